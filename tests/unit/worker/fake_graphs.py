"""What stands in for CUDA graphs on a CPU, and a model and an attention to be captured.

:class:`RecordedGraph` keeps every operator that ran at the capture with its very arguments, and
replays exactly these: a number that was read from the host stays what it was, a tensor that was
not written in place keeps its old content. So it errs where a CUDA graph would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tgi_cli.attention import AttentionMetadata
from tgi_cli.attention.reference import ReferenceAttention
from tgi_cli.sampling.sampler import Sampled


class RecordedGraph:
    """Implements :class:`tgi_cli.worker.graph_capture.Graph`."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        with _Recorder(self._calls):
            return work()

    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, output in self._calls:
            anew = function(*args, **kwargs)
            held = {storage(leaf) for leaf in tree_leaves((args, kwargs)) if is_tensor(leaf)}
            for old, new in zip(tree_leaves(output), tree_leaves(anew), strict=True):
                if is_tensor(old) and storage(old) not in held:  # no view, not in place
                    old.copy_(new)


_WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,
}
"""Operators that ask the device for a number."""


class RefuseWaiting(TorchDispatchMode):
    """Raises where the host would wait for a device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function in _WAITING:
            raise RuntimeError("called a synchronizing operation")
        return function(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[tuple[Any, Any, Any, Any]]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function in _WAITING:
            raise RuntimeError("operation not permitted when stream is capturing")
        output = function(*args, **(kwargs or {}))
        self._calls.append((function, args, kwargs or {}, output))
        return output


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class PaddedAttention(ReferenceAttention):
    """The oracle, and steps of a fixed size out of operators whose shapes never vary."""

    rows: int | None = None
    buffers: AttentionMetadata | None = None
    fixed: AttentionMetadata | None = None

    def plan(self, metadata: AttentionMetadata) -> None:
        self.rows = self.fixed = None
        super().plan(metadata)

    def decode_buffers(self, max_rows: int, max_blocks: int) -> AttentionMetadata:
        with self.device:
            self.buffers = AttentionMetadata(
                query_start_loc=torch.arange(max_rows + 1, dtype=torch.int32),
                kv_lens=torch.zeros(max_rows, dtype=torch.int32),
                block_table=torch.zeros(max_rows, max_blocks, dtype=torch.int32),
                slot_mapping=torch.full((max_rows,), -1),
                query_lens_host=[],
                kv_lens_host=[],
                num_decodes=0,
            )
        return self.buffers

    def plan_padded(self, metadata: AttentionMetadata | None, rows: int) -> None:
        assert metadata is None
        buffers = self.buffers
        assert buffers is not None
        self.rows = rows
        buffers.kv_lens[:rows].zero_()
        buffers.slot_mapping[:rows].fill_(-1)
        self.fixed = AttentionMetadata(
            buffers.query_start_loc[: rows + 1],
            buffers.kv_lens[:rows],
            buffers.block_table[:rows],
            buffers.slot_mapping[:rows],
            [],
            [],
            rows,
        )

    def plan_fixed(self, metadata: AttentionMetadata, max_context: int) -> None:
        self.rows, self.fixed = len(metadata.kv_lens), metadata

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        step = self.fixed
        if step is None:
            return super().__call__(layer, query, key, value, scale, softcap, sinks, bias)
        assert key is not None
        assert value is not None
        assert bias is None
        slots, lengths, starts = step.slot_mapping, step.kv_lens, step.query_start_loc
        assert len(query) == len(slots)
        for cache, new in ((self.key_cache[layer], key), (self.value_cache[layer], value)):
            flat = cache.flatten(0, 1)
            here = torch.arange(len(flat), device=self.device)[:, None] == slots[None, :]
            written = here.any(1)[:, None, None]
            flat.copy_(torch.where(written, new.index_select(0, here.int().argmax(1)), flat))
        tokens = torch.arange(len(query), dtype=torch.int32, device=self.device)
        rows = torch.searchsorted(starts[1:], tokens, right=True).clamp(max=len(lengths) - 1)
        # Of a sequence's last token, all of its KV is seen; of others, as much less.
        until = lengths[rows] - (starts[rows + 1] - 1 - tokens)
        until = torch.where(tokens < starts[-1], until, 0)
        table = step.block_table[rows]
        keys = self.key_cache[layer][table].flatten(1, 2).float()  # [T, keys, heads, dim]
        values = self.value_cache[layer][table].flatten(1, 2).float()
        share = query.shape[1] // key.shape[1]
        keys, values = keys.repeat_interleave(share, 2), values.repeat_interleave(share, 2)
        scores = torch.einsum("rhd,rkhd->rhk", query.float(), keys) * scale
        seen = torch.arange(keys.shape[1], device=self.device)[None, :] < until[:, None]
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        values = values.masked_fill(~seen[:, :, None, None], 0.0)
        output = torch.einsum("rhk,rkhd->rhd", weights.nan_to_num(0.0), values)
        return output.to(query.dtype)


def greedy(logits: Tensor) -> Sampled:
    """As :func:`tgi_cli.sampling.sampler.greedy`, out of operators that can be recorded."""
    token_ids = logits.argmax(-1)
    logprobs = logits.log_softmax(-1).gather(1, token_ids[:, None])[:, 0]
    return Sampled(token_ids, logprobs, None)


class TinyModel:
    """Two layers of attention and a head, in plain operators; reads positions, too."""

    HEADS, KV_HEADS, DIM = 4, 2, 8
    position_axes = 1
    weight_bytes = 1 << 20
    kv_window = None
    vision = None

    def __init__(self, vocab_size: int, seed: int = 0, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        torch.manual_seed(seed)
        width, projected = 16, (self.HEADS + 2 * self.KV_HEADS) * self.DIM
        self.embedding = torch.randn(vocab_size, width).to(device)
        self.places = torch.randn(256, width).to(device)
        self.qkv = [torch.randn(width, projected).to(device) / 4 for _ in range(2)]
        self.out = [torch.randn(self.HEADS * self.DIM, width).to(device) / 4 for _ in range(2)]
        self.head = torch.randn(width, vocab_size).to(device)
        self.head_rows: list[int] = []

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: Any, images: object = None
    ) -> Tensor:
        # Of positions on several axes, the mean.
        places = self.places.index_select(0, positions.flatten()).view(-1, len(input_ids), 16)
        hidden = self.embedding.index_select(0, input_ids) + places.mean(0)
        for layer, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            heads = (hidden @ qkv).view(len(hidden), -1, self.DIM)
            query, key, value = heads.split([self.HEADS, self.KV_HEADS, self.KV_HEADS], 1)
            attended = attention(layer, query, key, value, self.DIM**-0.5)
            hidden = hidden + torch.tanh(attended.flatten(1) @ out)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        self.head_rows.append(len(hidden))
        return (hidden @ self.head).float()


class Syncing(TinyModel):
    """Asks the device for a number."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: Any, images: object = None
    ) -> Tensor:
        hidden = super().forward(input_ids, positions, attention)
        return hidden + 0 * int(positions.max())
