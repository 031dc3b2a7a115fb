"""The arguments of the operations of a :class:`~tgi_cli.kernels.program.Program`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tgi_cli.kernels.program_args import NormKind, ViewArgs


@dataclass(frozen=True, slots=True)
class BufferView:
    """Part of a buffer: the buffer's number, and the offset in a token's row."""

    buffer: int
    offset: int = 0

    def at(self, offset: int) -> BufferView:
        return BufferView(self.buffer, self.offset + offset)


def view_args(view: BufferView | None) -> ViewArgs:
    """The struct for C++; None is an empty view."""
    return ViewArgs(-1, 0) if view is None else ViewArgs(view.buffer, view.offset)


RESIDUAL = BufferView(0)
"""The embeddings at first; overwritten."""
OUTPUT = BufferView(1)
PER_LAYER = BufferView(2)
"""The buffer with each layer's own embedding of the token."""


@dataclass(frozen=True, slots=True)
class NormWeights:
    """A norm over ``width`` numbers; its tensors are float32."""

    kind: NormKind
    width: int
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The attention heads of the layer whose KV cache has the index ``layer``."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    """Width of a value. Default: ``head_dim``."""


@dataclass(frozen=True, slots=True)
class Rope:
    """The effect of positions on queries and keys.

    Attributes:
        index: among the ropes of a step.
        rotated: leading dimensions of a head that are rotated; 0: queries have a factor instead.
    """

    index: int
    rotated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """RMS norms of heads before they are cached; weights are float32.

    Attributes:
        weight: weight of queries and keys, [heads + kv_heads, head_dim], or None.
        value_weight: weight of values, [kv_heads, value_dim], or None.
        eps: epsilon of all.
    """

    weight: Tensor | None = None
    value_weight: Tensor | None = None
    eps: float = 0.0


SPAN_CODES = {"none": 0, "window": 1, "whole": 2}
"""How queries see bidirectional spans, as ``cpp/attention.h`` numbers it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRule:
    """Operations on scores; see :class:`tgi_cli.attention.PagedAttention`.

    ``sinks`` and ``bias`` are float32. ``spans`` is a key of :data:`SPAN_CODES`.
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    spans: str = "none"
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RecurrenceViews:
    """Where the inputs of linear attention are; ``beta`` is of the delta rule alone."""

    query: BufferView
    key: BufferView
    value: BufferView
    decay: BufferView
    beta: BufferView | None = None


@dataclass(frozen=True, slots=True)
class Mix:
    """A weighted sum of rows for each of a token's streams.

    Attributes:
        streams: how many there are, ``width`` numbers each.
        sources: how many rows are added to each.
        plus: added to the factors.
    """

    streams: int
    sources: int
    width: int
    plus: float = 0.0
