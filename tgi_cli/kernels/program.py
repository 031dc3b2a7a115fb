"""A decoder's layers as one list of operations, which C++ runs in one call.

What a CUDA graph is to a GPU: no Python, no dispatch and no allocation between the operations of
a step. With one token a 135M Llama takes 240 operations; 3 us each, as calls from Python cost at
least, would add a tenth to its step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from tgi_cli.kernels.library import cpp_library, threads
from tgi_cli.kernels.linear import PackedMatrix


class OpKind(IntEnum):
    """Operations, as ``cpp/program.h`` numbers them."""

    NORM = 0
    LINEAR = 1
    ROTATE = 2
    ATTEND = 3


class _Op(Structure):
    """``Op`` of ``cpp/program.h``."""

    _fields_ = (
        ("kind", c_int32),
        ("input", c_int32),
        ("input_offset", c_int32),
        ("output", c_int32),
        ("output_offset", c_int32),
        ("residual", c_int32),
        ("norm", c_int32),
        ("width", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("eps", c_float),
        ("scale", c_float),
        ("matrix", c_void_p),
        ("linear_bias", c_void_p),
        ("epilogue", c_int32),
        ("activation", c_int32),
        ("layer", c_int32),
        ("rope", c_int32),
        ("rotated", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("value_dim", c_int32),
        ("window", c_int64),
        ("chunk", c_int64),
        ("attention_scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
        ("attention_bias", c_void_p),
        ("distances", c_int64),
    )


class _RunArgs(Structure):
    """``Run`` of ``cpp/program.h``."""

    _fields_ = (
        ("tokens", c_int64),
        ("residual", c_void_p),
        ("output", c_void_p),
        ("step", c_void_p),
        ("caches", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("seconds", POINTER(c_double)),
        ("threads", c_int32),
    )


@dataclass(frozen=True, slots=True)
class BufferView:
    """Part of a buffer: the buffer's number, and the offset in a token's row."""

    buffer: int
    offset: int = 0

    def at(self, offset: int) -> BufferView:
        return BufferView(self.buffer, self.offset + offset)


class NormKind(IntEnum):
    """As ``cpp/program.h`` numbers them."""

    NONE = 0
    RMS = 1
    LAYER = 2


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
        self._ops: list[_Op] = []
        self._kept: list[Any] = []
        self._handle: c_void_p | None = None
        self._run = _RunArgs()
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

    def seal(self) -> None:
        """Finish the program: no further operations can be added."""
        ops = (_Op * len(self._ops))(*self._ops)
        widths = (c_int64 * len(self._widths))(*self._widths)
        new = self._library.tgi_program_new
        new.restype = c_void_p
        handle = new(ops, c_int64(len(ops)), widths, c_int64(len(widths)))
        self._handle = c_void_p(handle)

    def run(
        self,
        residual: Tensor,
        step: Structure,
        caches: Any,
        rotations: Sequence[tuple[Tensor, Tensor]],
        seconds: Any = None,
    ) -> Tensor:
        """Embeddings [T, hidden], which are overwritten, to the result [T, hidden].

        Args:
            residual: contiguous.
            step, caches: of the attention backend that was planned for the step.
            rotations: cosines and sines of the step's positions for each rope.
            seconds: a ctypes array of doubles, one per operation, to which their times are added.

        Raises:
            MemoryError: no memory for the buffers of so many tokens.
        """
        output = torch.empty_like(residual)
        run, count = self._run, len(rotations)
        # The tensors live in the caller's list, and the arrays here, until the call is over.
        cosines = (c_void_p * count)(*(cosine.data_ptr() for cosine, _ in rotations))
        sines = (c_void_p * count)(*(sine.data_ptr() for _, sine in rotations))
        run.tokens = residual.shape[0]
        run.residual, run.output = residual.data_ptr(), output.data_ptr()
        run.step, run.caches = ctypes.addressof(step), ctypes.addressof(caches)
        run.cosines, run.sines = ctypes.addressof(cosines), ctypes.addressof(sines)
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
        heads: HeadLayout | None = None,
        **fields: Any,
    ) -> _Op:
        op = _Op(kind=kind, residual=-1, **{"scale": 1.0, **fields})
        op.input, op.input_offset = source.buffer, source.offset
        op.output, op.output_offset = target.buffer, target.offset
        if heads is not None:
            op.layer, op.head_dim = heads.layer, heads.head_dim
            op.heads, op.kv_heads = heads.num_heads, heads.num_kv_heads
            op.value_dim = heads.head_dim if heads.value_dim is None else heads.value_dim
        self._ops.append(op)
        self.labels.append(label)
        return op

    def _keep(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._kept.append(tensor)
        return tensor.data_ptr()
