"""A decoder's layers as one list of operations, which C++ runs in one call.

What a CUDA graph is to a GPU: no Python, no dispatch and no allocation between the operations of
a step. With one token a 135M Llama takes 240 operations; 3 us each, as calls from Python cost at
least, would add a tenth to its step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, byref, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tgi_cli.kernels.heads import HeadMatrices
from tgi_cli.kernels.library import cpp_library, threads
from tgi_cli.kernels.linear import PackedMatrix
from tgi_cli.kernels.program_args import NormKind, OpArgs, OpKind, RunArgs
from tgi_cli.kernels.recurrence import ConvolutionLayer, GateLayer, RecurrenceLayer


@dataclass(frozen=True, slots=True)
class BufferView:
    """Part of a buffer: the buffer's number, and the offset in a token's row."""

    buffer: int
    offset: int = 0

    def at(self, offset: int) -> BufferView:
        return BufferView(self.buffer, self.offset + offset)


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
    """Of values. Default: ``head_dim``."""


@dataclass(frozen=True, slots=True)
class RecurrenceViews:
    """Where the inputs of linear attention are; ``beta`` is of the delta rule alone."""

    query: BufferView
    key: BufferView
    value: BufferView
    decay: BufferView
    beta: BufferView | None = None


@dataclass(slots=True)
class ProgramInputs:
    """What the parts of a program are given in one step.

    Attributes:
        step, caches: of the attention backend that was planned for the step.
        rotations: arrays of pointers to the cosines and sines of the step's positions, for each
            rope.
        slots: of the step's states, of models that have some.
        states: an array of pointers, two per layer with states: of its convolution, and of its
            recurrence.
        kept: what the arrays point to.
    """

    step: Structure
    caches: Any
    rotations: tuple[Any, Any]
    slots: Structure | None
    states: Any
    kept: Any

    @classmethod
    def of(
        cls,
        step: Structure,
        caches: Any,
        rotations: Sequence[tuple[Tensor, Tensor]],
        slots: Structure | None = None,
        states: Any = None,
    ) -> ProgramInputs:
        """With ``rotations`` as tensors."""
        pointers = c_void_p * len(rotations)
        cosines = pointers(*(cosine.data_ptr() for cosine, _ in rotations))
        sines = pointers(*(sine.data_ptr() for _, sine in rotations))
        return cls(step, caches, (cosines, sines), slots, states, rotations)


RESIDUAL = BufferView(0)
"""The embeddings at first; overwritten."""
OUTPUT = BufferView(1)


class Program:
    """Add operations, then call :meth:`seal` once, then :meth:`run` for each step.

    Tensors are bfloat16; norms' weights are float32. The program keeps its tensors alive.

    Args:
        hidden_size: of the residual and of the result.

    Raises:
        RuntimeError: there is no library of kernels.
    """

    def __init__(self, hidden_size: int) -> None:
        library = cpp_library()
        if library is None:
            raise RuntimeError("the kernels are not compiled for this processor")
        self._library = library
        self.hidden_size = hidden_size
        self._widths = [hidden_size, hidden_size]
        self._ops: list[OpArgs] = []
        self._kept: list[Any] = []
        self._cuts = [0]
        self._handle: c_void_p | None = None
        self._run = RunArgs()
        self._run_reference = byref(self._run)
        self.labels: list[str] = []
        """Names of the operations, for profiles."""

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self._library.tgi_program_free(self._handle)

    def buffer(self, width: int) -> BufferView:
        """A further buffer of ``width`` numbers per token."""
        self._widths.append(width)
        return BufferView(len(self._widths) - 1)

    def norm(
        self,
        label: str,
        source: BufferView,
        target: BufferView,
        norm: NormWeights,
        residual: BufferView | None = None,
        scale: float = 1.0,
    ) -> None:
        """residual += scale * source, if there is one; target = norm of that, or of source."""
        op = self._add(
            label, OpKind.NORM, source, target, width=norm.width, norm=norm.kind, eps=norm.eps
        )
        op.weight, op.bias = self._keep(norm.weight), self._keep(norm.bias)
        op.residual = -1 if residual is None else residual.buffer
        op.scale = scale

    def linear(
        self,
        label: str,
        source: BufferView,
        target: BufferView,
        matrix: PackedMatrix,
        bias: Tensor | None,
        *,
        epilogue: int,
        activation: int = 0,
        scale: float = 1.0,
    ) -> None:
        """target = epilogue(source times the matrix plus bias)."""
        op = self._add(
            label,
            OpKind.LINEAR,
            source,
            target,
            epilogue=epilogue,
            activation=activation,
            scale=scale,
        )
        self._kept.append(matrix)
        op.matrix = matrix.address
        op.linear_bias = self._keep(bias)

    def rotate(
        self,
        label: str,
        qkv: BufferView,
        heads: HeadLayout,
        *,
        rope: int | None,
        rotated: int = 0,
        weight: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """Norm (``weight`` float32 [heads, head_dim]) and rotate queries and keys in place.

        Keys, and the values behind them, then go into the layer's cache.
        """
        op = self._add(label, OpKind.ROTATE, qkv, qkv, heads, eps=eps, rotated=rotated)
        op.rope = -1 if rope is None else rope
        op.weight = self._keep(weight)

    def attend(
        self,
        label: str,
        queries: BufferView,
        target: BufferView,
        heads: HeadLayout,
        *,
        scale: float,
        window: int | None,
        chunk: int | None = None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:
        """target = attention of the queries over the cache; ``sinks`` are float32 [heads]."""
        op = self._add(label, OpKind.ATTEND, queries, target, heads, softcap=softcap or 0.0)
        op.attention_scale, op.sinks = scale, self._keep(sinks)
        op.window, op.chunk = window or 0, chunk or 0

    def convolve(
        self,
        label: str,
        source: BufferView,
        target: BufferView,
        layer: ConvolutionLayer,
        state: int,
        before: BufferView | None = None,
        after: BufferView | None = None,
    ) -> None:
        """target = the convolution of source, as :func:`~tgi_cli.kernels.recurrence.convolution`.

        ``state`` is the index of the layer's states.
        """
        op = self._add(label, OpKind.CONVOLVE, source, target, layer=state)
        _set_others(op, before, after)
        op.convolution = self._keep_layer(layer, layer.args())

    def recur(
        self,
        label: str,
        sources: RecurrenceViews,
        target: BufferView,
        layer: RecurrenceLayer,
        state: int,
    ) -> None:
        """target = linear attention, as :func:`~tgi_cli.kernels.recurrence.recurrence`."""
        op = self._add(label, OpKind.RECUR, sources.value, target, layer=state)
        _set_others(op, sources.query, sources.key, sources.decay, sources.beta)
        op.recurrence = self._keep_layer(layer, layer.args())

    def gate(
        self,
        label: str,
        source: BufferView,
        by: BufferView,
        target: BufferView,
        layer: GateLayer,
        groups: int,
        width: int,
    ) -> None:
        """target = source, gated, as :func:`~tgi_cli.kernels.recurrence.gate`; may be source."""
        op = self._add(label, OpKind.GATE, source, target)
        _set_others(op, by)
        op.gate = self._keep_layer(layer, layer.args(groups, width))

    def heads(
        self,
        label: str,
        source: BufferView,
        target: BufferView,
        matrices: HeadMatrices,
        strides: tuple[int, int],
    ) -> None:
        """target = each head of source times its matrix; heads are so far apart in each."""
        op = self._add(
            label,
            OpKind.HEADS,
            source,
            target,
            heads=matrices.heads,
            head_input=strides[0],
            head_output=strides[1],
        )
        self._kept.append(matrices)
        op.matrix = matrices.address

    def latent(
        self,
        label: str,
        queries: BufferView,
        row: BufferView,
        target: BufferView,
        heads: HeadLayout,
        *,
        stride: int,
        rope: int | None,
        rotated: int = 0,
    ) -> None:
        """Rotate the last dimensions of queries and of the row, which goes into the cache.

        Of each head in ``queries``, ``stride`` numbers apart, these dimensions come behind those of
        the latent in ``target``, [heads, head_dim].
        """
        op = self._add(
            label, OpKind.LATENT, queries, target, heads, head_input=stride, rotated=rotated
        )
        op.rope = -1 if rope is None else rope
        _set_others(op, row)

    def cut(self) -> None:
        """End a part: between it and the next one, its caller does something with its result."""
        self._cuts.append(len(self._ops))

    def seal(self) -> None:
        """Finish the program: no further operations can be added."""
        self.cut()
        ops = (OpArgs * len(self._ops))(*self._ops)
        widths = (c_int64 * len(self._widths))(*self._widths)
        new = self._library.tgi_program_new
        new.restype = c_void_p
        handle = new(ops, c_int64(len(ops)), widths, c_int64(len(widths)))
        self._handle = c_void_p(handle)

    def run(
        self, residual: Tensor, inputs: ProgramInputs, part: int = 0, seconds: Any = None
    ) -> Tensor:
        """Embeddings [T, hidden], which become the residual, to the result [T, hidden].

        Args:
            residual: contiguous; overwritten.
            inputs: of the step.
            part: which of the parts that :meth:`cut` makes; the parts of a step run in their order.
            seconds: a ctypes array of doubles, one per operation, to which their times are added.

        Raises:
            MemoryError: no memory for the buffers of so many tokens.
        """
        output = torch.empty_like(residual)
        run = self._run
        run.first, run.last = self._cuts[part], self._cuts[part + 1]
        run.tokens = residual.shape[0]
        run.residual, run.output = residual.data_ptr(), output.data_ptr()
        run.step, run.caches = ctypes.addressof(inputs.step), ctypes.addressof(inputs.caches)
        run.cosines, run.sines = map(ctypes.addressof, inputs.rotations)
        run.slots = None if inputs.slots is None else ctypes.addressof(inputs.slots)
        run.states = None if inputs.states is None else ctypes.addressof(inputs.states)
        run.seconds = seconds
        run.threads = threads()
        if self._library.tgi_program_run(self._handle, self._run_reference):
            raise MemoryError(f"no memory for the activations of {residual.shape[0]} tokens")
        return output

    def _add(
        self,
        label: str,
        kind: OpKind,
        source: BufferView,
        target: BufferView,
        layout: HeadLayout | None = None,
        **fields: Any,
    ) -> OpArgs:
        op = OpArgs(kind=kind, residual=-1, **{"scale": 1.0, **fields})
        op.input, op.input_offset = source.buffer, source.offset
        op.output, op.output_offset = target.buffer, target.offset
        if layout is not None:
            op.layer, op.head_dim = layout.layer, layout.head_dim
            op.heads, op.kv_heads = layout.num_heads, layout.num_kv_heads
            op.value_dim = layout.head_dim if layout.value_dim is None else layout.value_dim
        self._ops.append(op)
        self.labels.append(label)
        return op

    def _keep_layer(self, layer: object, args: Structure) -> int:
        """The address of a layer's fields."""
        self._kept += (layer, args)
        return ctypes.addressof(args)

    def _keep(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._kept.append(tensor)
        return tensor.data_ptr()


def _set_others(op: OpArgs, *views: BufferView | None) -> None:
    for other, view in zip(op.others, (*views, None, None, None, None), strict=False):
        other.buffer, other.offset = (-1, 0) if view is None else (view.buffer, view.offset)
