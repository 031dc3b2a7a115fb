"""Token ids to vectors, and vectors to logits; the vocabulary is split over the shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from tgi_cli.device.memory import release_pages
from tgi_cli.kernels.linear import Epilogue, linear, rows
from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.layers.base import Build, Loadable, WeightSlot, empty_parameter
from tgi_cli.layers.linear import LinearBase
from tgi_cli.quantization.block_weight import CodedWeight
from tgi_cli.quantization.matmul import CppMatmul, make_matmul


def _own_rows(build: Build, vocab_size: int) -> tuple[int, int, int]:
    """Rows of a table per shard, and the range of this shard's; the last shard's are padded."""
    rows = -(-vocab_size // build.shard.size)
    start = min(rows * build.shard.rank, vocab_size)
    return rows, start, min(start + rows, vocab_size)


def _fill_rows(table: Tensor, whole: Tensor, start: int, end: int) -> None:
    table[: end - start].copy_(whole[start:end])
    table[end - start :].zero_()


class Embedding(Loadable):
    """The table of token vectors: ids int64 [T] -> [T, hidden].

    If a tied head has a packed copy of its own (see :class:`LMHead`), the table need not be in
    memory a second time: vectors are then read from the packed copy, or, if that is not exact to
    the bit, from the checkpoint's mapped file.

    A quantized table stays quantized where the CPU's kernels read its rows: in a tied head's packed
    copy, or else in its own.
    """

    def __init__(self, build: Build, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.shard = build.shard
        self.dtype = build.dtype
        self.vocab_size = vocab_size
        self.rows, self.start, self.end = _own_rows(build, vocab_size)
        self.weight: nn.Parameter | None = empty_parameter(
            self.rows, hidden_size, dtype=build.dtype
        )
        self.shape = (vocab_size, hidden_size)
        self.may_stay_mapped = False
        self.mapped: Tensor | None = None
        self.head: PackedMatrix | None = None
        """The packed weight of a tied head, or its own, whose rows are the vectors."""
        self.quantized: CodedWeight | None = None
        """This shard's table, until it or a tied head is packed."""

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{path}.weight", self.shape, self._fill, self._keep, takes_quantized=True)

    def materialize(self, device: torch.device) -> None:
        self.device = device  # memory is taken later, and only if it is needed

    def _keep(self, tensor: Tensor) -> bool:
        if not self.may_stay_mapped or self.device.type != "cpu":
            return False
        self.mapped, self.weight = tensor[self.start : self.end], None
        return True

    def _fill(self, tensor: Tensor | CodedWeight) -> None:
        if isinstance(tensor, CodedWeight):
            self.quantized = tensor[self.start : self.end].padded(self.rows)
            self.weight = None
            return
        super().materialize(self.device)
        assert self.weight is not None
        _fill_rows(self.weight, tensor, self.start, self.end)

    def finish(self) -> None:
        if self.quantized is not None and not self.may_stay_mapped:
            matmul = None
            if self.device.type == "cpu":
                matmul = make_matmul(self.quantized, self.dtype, self.device)
            if isinstance(matmul, CppMatmul) and matmul.order is None:
                self.head, self.quantized = matmul.matrix, None
            else:
                self._dequantize()

    def _dequantize(self) -> None:
        assert self.quantized is not None
        table = self.quantized.dequantize(self.dtype, self.device)
        self.weight, self.quantized = nn.Parameter(table, requires_grad=False), None

    def settle_quantized(self, head_weight: nn.Parameter | None, packed: object) -> None:
        """Share a tied head's weight, which was packed from this table's codes."""
        if isinstance(packed, PackedMatrix):
            self.head, self.quantized = packed, None
        elif head_weight is not None:
            self.weight, self.quantized = head_weight, None
        else:
            self._dequantize()

    def table(self) -> Tensor:
        """[rows of this shard, hidden], in the model's dtype."""
        if self.weight is not None:
            return self.weight
        assert self.mapped is not None
        whole = self.mapped.to(self.dtype)
        missing = self.rows - len(whole)
        return nn.functional.pad(whole, (0, 0, 0, missing)) if missing else whole

    def settle(self, head_weight: nn.Parameter | None, packed: object) -> None:
        """Drop the table for a tied head's weight, which is plain or packed, where it is equal."""
        if head_weight is None:
            self.release()
        if isinstance(packed, PackedMatrix) and packed.bits == 16:
            self.head, self.weight, self.mapped = packed, None, None
        elif self.mapped is not None and head_weight is not None:
            self.weight, self.mapped = head_weight, None

    def is_mapped(self, weight: Tensor) -> bool:
        """Whether ``weight`` is in the checkpoint's mapped file."""
        return self.mapped is not None and weight.data_ptr() == self.mapped.data_ptr()

    def release(self) -> None:
        """Drop the pages of a mapped table, after it was read."""
        if self.mapped is not None:
            release_pages(self.mapped)

    def forward(self, ids: Tensor) -> Tensor:
        if self.shard.size == 1:
            return self._rows(ids)
        local = ids - self.start
        foreign = (local < 0) | (local >= self.end - self.start)
        vectors = self._rows(local.masked_fill_(foreign, 0))
        return self.shard.all_reduce(vectors.masked_fill_(foreign[:, None], 0))

    def _rows(self, ids: Tensor) -> Tensor:
        if self.head is not None:
            return rows(self.head, ids)
        if self.mapped is not None:
            return self.mapped.index_select(0, ids).to(self.dtype)
        assert self.weight is not None
        return self.weight.index_select(0, ids)


class PositionEmbedding(Loadable):
    """The table of learned position vectors, whole on every shard: int64 [T] -> [T, hidden]."""

    def __init__(self, build: Build, positions: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = empty_parameter(positions, hidden_size, dtype=build.dtype)

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield self.slot(f"{path}.weight", "weight", tuple(self.weight.shape))

    def forward(self, positions: Tensor) -> Tensor:
        return self.weight.index_select(0, positions)


class LMHead(LinearBase):
    """Hidden states [N, hidden] to float32 logits [N, vocab], the same on every shard.

    A tied head takes its weight from the embedding. If weights are packed it has a packed copy,
    which takes half the time (5.9 ms of one core plain, 3.1 packed, for a vocabulary of 49152 and
    a width of 576). It is quantized only if the checkpoint's is, or ``build.head`` does it; the
    vectors of a tied embedding are then as exact as before.
    """

    exempt = True

    def __init__(
        self,
        build: Build,
        hidden_size: int,
        vocab_size: int,
        tied: Embedding | None,
        bias: bool = False,
    ) -> None:
        rows, self.start, self.end = _own_rows(build, vocab_size)
        own = build if build.head is None else replace(build, quantization=build.head)
        super().__init__(own, hidden_size, rows, bias)
        self.shard = build.shard
        self.is_quantized = build.head is not None
        self.vocab_size = vocab_size
        self._tied = (tied,)  # in a tuple, so that it does not become a submodule
        if tied is not None:
            tied.may_stay_mapped = True

    @property
    def loads_after(self) -> Embedding | None:
        return self._tied[0]

    def slots(self, path: str) -> Iterator[WeightSlot]:
        if self._tied[0] is None:
            shape = (self.vocab_size, self.in_features)
            yield WeightSlot(f"{path}.weight", shape, self._fill_weight, takes_quantized=True)
        if self.bias is not None:
            yield WeightSlot(f"{path}.bias", (self.vocab_size,), self._fill_bias)

    def _fill_weight(self, weight: Tensor | CodedWeight) -> None:
        own = weight[self.start : self.end]
        missing = self.out_features - (self.end - self.start)
        if isinstance(own, CodedWeight):
            own = own.padded(self.out_features)
        elif missing:
            own = nn.functional.pad(own, (0, 0, 0, missing))
        self.method.fill(self, slice(0, self.out_features), own)

    def _fill_bias(self, bias: Tensor) -> None:
        assert self.bias is not None
        _fill_rows(self.bias, bias, self.start, self.end)

    def materialize(self, device: torch.device) -> None:
        if self._tied[0] is not None:
            self.weight = None  # its memory is the embedding's
        super().materialize(device)

    def finish(self) -> None:
        tied = self._tied[0]
        if tied is None:
            super().finish()
        elif tied.quantized is not None:
            self.method.fill(self, slice(0, self.out_features), tied.quantized)
            super().finish()
            tied.settle_quantized(self.weight, self.packed)
        elif self.is_quantized:
            # As from a checkpoint, weights are quantized on the host.
            self.method.fill(self, slice(0, self.out_features), tied.table().cpu())
            super().finish()
            tied.release()
        else:
            self.weight = nn.Parameter(tied.table(), requires_grad=False)
            super().finish()
            if self.weight is not None and tied.is_mapped(self.weight):
                self.weight = nn.Parameter(self.weight.clone(), requires_grad=False)
            tied.settle(self.weight, self.packed)

    @property
    def own_vocabulary(self) -> range | None:
        """The tokens whose logits this shard computes; None where a shard would have none."""
        if self.out_features * (self.shard.size - 1) >= self.vocab_size:
            return None
        return range(self.start, self.end)

    def own_logits(self, x: Tensor) -> Tensor:
        """float32 logits [N, W] of :attr:`own_vocabulary`, those of :meth:`forward`."""
        return super().forward(x)[:, : self.end - self.start].float()

    def forward(self, x: Tensor) -> Tensor:
        if self.shard.size == 1 and isinstance(self.packed, PackedMatrix):
            # The same as the lines below in one call: rounded to bfloat16, stored in float32.
            return linear(x, self.packed, self.bias, Epilogue.FLOAT)
        logits = self.shard.all_gather(super().forward(x))
        if logits.shape[-1] > self.vocab_size:
            logits = logits[:, : self.vocab_size]
        return logits.float()
