"""A decoder's layers as one list of operations, which C++ runs in one call.

The CPU's equivalent of a CUDA graph: no Python, dispatch or allocation between the operations of a
step. A 135M Llama takes 240 operations; 3 us for each, the least cost of calls from Python, would
add a tenth to a step of one token.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, byref, c_int64, c_void_p
from typing import Any

from torch import Tensor

from tgi_cli.kernels.experts import PackedExperts
from tgi_cli.kernels.heads import HeadMatrices
from tgi_cli.kernels.library import cpp_library, threads
from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.kernels.program_args import MixArgs, OpArgs, OpKind, ProgramInputs, RunArgs
from tgi_cli.kernels.program_parts import (
    SPAN_CODES,
    BufferView,
    HeadLayout,
    HeadNorms,
    Mix,
    NormWeights,
    RecurrenceViews,
    Rope,
    ScoreRule,
    view_args,
)
from tgi_cli.kernels.recurrence import ConvolutionLayer, GateLayer, RecurrenceLayer


class Program:
    """Add operations, then call :meth:`seal` once, then :meth:`run` for each step.

    Tensors are bfloat16; norms' weights are float32. The program keeps its tensors alive.

    Args:
        hidden_size: width of the result.
        residual_size: default: ``hidden_size``.
        per_layer_size: width of a token's embeddings for all layers.

    Raises:
        RuntimeError: there is no library of kernels.
    """

    def __init__(
        self, hidden_size: int, residual_size: int | None = None, per_layer_size: int = 0
    ) -> None:
        library = cpp_library()
        if library is None:
            raise RuntimeError("the kernels are not compiled for this processor")
        self._library = library
        self.hidden_size = hidden_size
        self._widths = [residual_size or hidden_size, hidden_size, per_layer_size]
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
        """residual += scale * source, if one is given; target = norm of that, or of source."""
        op = self._add(
            label, OpKind.NORM, source, target, width=norm.width, norm=norm.kind, eps=norm.eps
        )
        op.weight, op.bias = self._keep(norm.weight), self._keep(norm.bias)
        op.residual = view_args(residual)
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
        heads: HeadLayout,
        queries: BufferView,
        values: BufferView | None,
        *,
        rope: Rope | None,
        norms: HeadNorms,
        values_from_keys: bool = False,
    ) -> None:
        """Norm and rotate queries, and the keys after them, in place.

        Keys and ``values`` then go into the layer's cache; without ``values`` there are no keys.
        ``values_from_keys``: they are what keys are before their norm, copied there first.
        """
        op = self._add(label, OpKind.ROTATE, queries, queries, heads, eps=norms.eps)
        _set_rope(op, rope)
        _set_others(op, values)
        if values is None:
            op.kv_heads = 0
        op.values_from_keys = values_from_keys
        op.weight, op.value_weight = self._keep(norms.weight), self._keep(norms.value_weight)

    def attend(
        self,
        label: str,
        queries: BufferView,
        target: BufferView,
        heads: HeadLayout,
        rule: ScoreRule,
    ) -> None:
        """target = attention of the queries over the cache."""
        op = self._add(label, OpKind.ATTEND, queries, target, heads, softcap=rule.softcap or 0.0)
        op.attention_scale, op.sinks = rule.scale, self._keep(rule.sinks)
        op.window, op.chunk = rule.window or 0, rule.chunk or 0
        op.spans = SPAN_CODES[rule.spans]
        if rule.bias is not None:
            # The kernel reads keys in their order, which is that of falling distances.
            op.attention_bias, op.distances = self._keep(rule.bias.flip(1)), rule.bias.shape[1]

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
        rope: Rope | None,
    ) -> None:
        """Rotate the last dimensions of queries and of the row, which goes into the cache.

        Of each head in ``queries``, ``stride`` numbers apart, these dimensions come after those of
        the latent in ``target``, [heads, head_dim].
        """
        op = self._add(label, OpKind.LATENT, queries, target, heads, head_input=stride)
        _set_rope(op, rope)
        _set_others(op, row)

    def multiply(
        self,
        label: str,
        source: BufferView,
        target: BufferView,
        by: BufferView | Tensor,
        width: int,
    ) -> None:
        """target = source times ``by``, a token's numbers or float32 [width]; may be source."""
        op = self._add(label, OpKind.MULTIPLY, source, target, width=width)
        if isinstance(by, Tensor):
            op.weight = self._keep(by)
        else:
            _set_others(op, by)

    def gate_sparsely(
        self,
        label: str,
        source: BufferView,
        target: BufferView,
        width: int,
        activation: int,
        deviations: float,
    ) -> None:
        """target = activation(gate) * up of source, as :func:`tgi_cli.layers.ops.sparse_gated`."""
        self._add(
            label,
            OpKind.SPARSE,
            source,
            target,
            width=width,
            activation=activation,
            scale=deviations,
        )

    def mix(
        self,
        label: str,
        source: BufferView,
        base: BufferView,
        factors: BufferView,
        target: BufferView,
        mix: Mix,
    ) -> None:
        """target = base plus source's rows times factors [streams, sources]; not source."""
        op = self._add(label, OpKind.MIX, source, target)
        _set_others(op, base, factors)
        args = MixArgs(mix.streams, mix.sources, mix.width, mix.plus)
        op.mix = self._keep_layer(mix, args)

    def experts(
        self, label: str, source: BufferView, target: BufferView, experts: PackedExperts
    ) -> None:
        """target = source through the experts that the layer's own routing chooses; not source."""
        op = self._add(label, OpKind.EXPERTS, source, target)
        op.mixture = self._keep_layer(experts, experts.args)

    def cut(self) -> None:
        """End a part: the caller uses its result before the next part runs."""
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
        self,
        residual: Tensor,
        inputs: ProgramInputs,
        first: int = 0,
        last: int = 1,
        seconds: Any = None,
    ) -> Tensor:
        """Embeddings [T, residual], which become the residual, to the result [T, hidden].

        Args:
            residual: contiguous; overwritten.
            inputs: inputs of the step.
            first, last: which of the parts that :meth:`cut` makes, without ``last``; those of a
                step run in their order.
            seconds: a ctypes array of doubles, one per operation, to which their times are added.

        Raises:
            MemoryError: there is no memory for the buffers of that many tokens.
        """
        output = residual.new_empty(residual.shape[0], self.hidden_size)
        run = self._run
        run.first, run.last = self._cuts[first], self._cuts[last]
        if run.first == run.last:  # cut twice at one place
            return output
        run.tokens = residual.shape[0]
        run.callers[0], run.callers[1] = residual.data_ptr(), output.data_ptr()
        run.callers[2] = None if inputs.per_layer is None else inputs.per_layer.data_ptr()
        run.step, run.caches = ctypes.addressof(inputs.step), ctypes.addressof(inputs.caches)
        ropes = inputs.ropes
        run.cosines, run.sines = ctypes.addressof(ropes.cosines), ctypes.addressof(ropes.sines)
        run.temperatures = ctypes.addressof(ropes.temperatures)
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
        op = OpArgs(kind=kind, **{"scale": 1.0, **fields})
        op.input, op.output, op.residual = view_args(source), view_args(target), view_args(None)
        op.rope = -1
        _set_others(op)
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
    for i in range(len(op.others)):
        op.others[i] = view_args(views[i] if i < len(views) else None)


def _set_rope(op: OpArgs, rope: Rope | None) -> None:
    if rope is not None:
        op.rope, op.rotated = rope.index, rope.rotated
