"""Attention over given keys on the CPU, with a cap of scores and with sinks.

Without a cap, torch's fused kernel does everything. A sink then costs one factor per row, as the
kernel also returns the logarithm of its divisor.

A cap applies between product and softmax, which torch's kernels do not allow. So the steps of the
fused kernel are done here, in fp32, one piece of the keys after the other ("Online
normalizer calculation for softmax", https://arxiv.org/abs/1805.02867).

Measured on one core in bf16 against the plain call. Sinks cost 0 to 20 percent, 60 us at least.
A cap, with the 8 query and 4 KV heads of 256 of Gemma 2 2B: a prompt of 512 takes 1.25 times as
long (25 ms), 32 decodes of 192 tokens 1.5 times (15 ms), one of 200 1.9 times (0.4 ms), one of
4096 1.1 times (11 ms). Small heads pay more, 9 and 3 of 64: prompts 1.8 times, decodes 2 to 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from tgi_cli.attention.base import bias_at
from tgi_cli.attention.cpu_plan import MATRIX_PIECE, PIECE, QUERIES

fused_with_sums: Callable[..., tuple[Tensor, Tensor]] | None = getattr(
    torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None
)
"""The kernel behind ``scaled_dot_product_attention``, which does not return the sums. It is private
to torch: without it, sinks are computed as caps are."""

_AT_ONCE = 256 * 1024
"""Elements of keys that are made fp32 together, to stay in a core's cache: with four times as many,
8 decodes of 1000 tokens take a fifth longer."""


@dataclass(slots=True)
class Scoring:
    """A layer's operations on scores; see :class:`~tgi_cli.attention.PagedAttention`."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    """fp32 [kv_heads, query heads of each]."""
    bias: Tensor | None = None
    """fp32 [heads, distances]."""

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        distances: Tensor | None = None,
    ) -> Tensor:
        """Attention of n sequences over their keys: [n, kv_heads, rows, head_dim].

        ``queries`` are [n, kv_heads, rows, head_dim]; the rows are tokens, each with all heads of
        the KV head, and the last row is the last head of the last token. ``keys`` and ``values``
        are [n, kv_heads, keys, head_dim]; ``mask`` (0 or -inf) is [rows, keys] or [n, 1, 1, keys].
        A bias needs ``distances`` from the last tokens to the keys, int64 [n or 1, tokens, keys].
        Rows without visible keys have arbitrary results.
        """
        if self.bias is not None:
            return self._attend_in_steps(queries, keys, values, mask, distances)
        if self.softcap is None and self.sinks is None:
            return scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=self.scale
            )
        if self.softcap is not None or fused_with_sums is None or queries.is_cuda:
            return self._attend_in_steps(queries, keys, values, mask)
        attended, log_sums = fused_with_sums(
            queries, keys, values, attn_mask=mask, scale=self.scale
        )
        # sigmoid(log_sums - sinks); torch's own rounds an element by its position in a tensor.
        remaining = (self._sinks_of_rows(queries) - log_sums).exp_().add_(1).reciprocal_()
        return attended.mul_(remaining[..., None])

    def attend_tokens(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        width: int,
        distances: Tensor | None = None,
    ) -> Tensor:
        """Attention of one token of each of n sequences: query [n, heads, head_dim].

        ``keys`` and ``values`` are [n, kv_heads, keys, dimensions], both as wide as the wider one
        (:func:`alike`); ``width`` is of values. ``mask`` is [n, 1 or kv_heads, 1, keys].

        Returns:
            [n, heads, width]
        """
        size, heads, head_dim = query.shape
        kv_heads, wide = keys.shape[1], keys.shape[3]
        share = heads // kv_heads
        queries = query.view(size, kv_heads, share, head_dim)
        if share % QUERIES or wide > head_dim:
            queries = pad(queries, (0, wide - head_dim, -share % QUERIES, 0))
        attended = self.attend(queries, keys, values, mask, distances)
        return attended[:, :, -share:, :width].reshape(size, heads, width)

    def _attend_in_steps(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        distances: Tensor | None = None,
    ) -> Tensor:
        output = torch.empty_like(queries)
        kv_heads, longest, head_dim = keys.shape[1:]
        at_once = max(1, _AT_ONCE // (kv_heads * min(longest, MATRIX_PIECE) * head_dim))
        for begin in range(0, len(queries), at_once):
            some = slice(begin, begin + at_once)
            hidden = mask[some] if mask.dim() == 4 else mask
            far = distances
            if far is not None and len(far) > 1:
                far = far[some]
            self._attend_some(queries[some], keys[some], values[some], hidden, far, output[some])
        return output

    def _attend_some(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        distances: Tensor | None,
        output: Tensor,
    ) -> None:
        size, kv_heads, rows, _ = queries.shape
        wide = torch.promote_types(queries.dtype, torch.float32)
        # cap * tanh(x) is 2 * cap / (1 + exp(-2x)) - cap, and torch's tanh takes twice as long. It
        # is exact to cap * 1e-7, as tanh is for scores near the cap. The last term is left out:
        # to shift all scores of a row does not change its weights, only the sink must follow.
        cap = self.softcap
        factor = self.scale if cap is None else -2 * self.scale / cap
        queries = (queries.to(wide) * factor).flatten(0, 1)
        lowest = torch.finfo(wide).min if cap is None or distances is not None else 0.0
        largest = queries.new_full((size * kv_heads, rows, 1), lowest)
        sums, attended = torch.zeros_like(largest), torch.zeros_like(queries)
        if self.sinks is not None:
            sinks = self._sinks_of_rows(queries).to(wide) + (cap or 0.0)
            sinks = sinks.repeat(size, 1)[..., None]
            largest = largest.maximum(sinks)
            sums = (sinks - largest).exp_()
        ones = queries.new_ones(MATRIX_PIECE, 16)
        for piece in _pieces(keys.shape[2]):
            weights = torch.bmm(queries, _widened(keys[:, :, piece], wide).transpose(1, 2))
            scores, hidden = weights.view(size, kv_heads, rows, -1), mask[..., piece].to(wide)
            if cap is None:
                scores.add_(hidden)
            else:
                scores.exp_().add_(1).reciprocal_()
                torch.add(hidden, scores, alpha=2 * cap, out=scores)
            if distances is not None:
                scores.add_(self._bias_of_rows(distances[..., piece], kv_heads, rows))
            before, largest = largest, largest.maximum(weights.amax(-1, keepdim=True))
            weights.sub_(largest).exp_()
            rescale = before.sub_(largest).exp_()
            # A product adds up a row in order, ``sum`` in one that depends on its length.
            sums = sums.mul_(rescale).add_((weights @ ones[: weights.shape[2]])[..., :1])
            attended.mul_(rescale).baddbmm_(weights, _widened(values[:, :, piece], wide))
        output.copy_(attended.div_(sums).view(output.shape))

    def _bias_of_rows(self, distances: Tensor, kv_heads: int, rows: int) -> Tensor:
        """[n or 1, kv_heads, rows, keys] for distances [n or 1, tokens, keys]."""
        assert self.bias is not None
        biases = bias_at(self.bias, distances)
        biases = biases.view(kv_heads, -1, *biases.shape[1:])
        biases = biases.permute(2, 0, 3, 1, 4).flatten(2, 3)
        return pad(biases, (0, 0, rows - biases.shape[2], 0))

    def _sinks_of_rows(self, queries: Tensor) -> Tensor:
        """[kv_heads, rows]."""
        assert self.sinks is not None
        rows = queries.shape[-2]
        return self.sinks.repeat(1, -(-rows // self.sinks.shape[1]))[:, -rows:]


def _pieces(keys: int) -> Iterator[slice]:
    """Where long rows are cut so that sums have the same order; see :mod:`.cpu_plan`."""
    for start in range(0, keys, PIECE):
        stop = min(start + PIECE, keys)
        for begin in range(start, stop, MATRIX_PIECE):
            yield slice(begin, min(begin + MATRIX_PIECE, stop))


def _widened(some: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, kv_heads, keys, head_dim] to contiguous [n * kv_heads, keys, head_dim]."""
    return some.new_empty(some.shape, dtype=dtype).copy_(some).flatten(0, 1)


def alike(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Pad both to the width of the wider one, which torch's fused kernel requires, with zeros."""
    gap = keys.shape[-1] - values.shape[-1]
    if gap < 0:
        keys = pad(keys, (0, -gap))
    return keys, pad(values, (0, gap)) if gap > 0 else values
