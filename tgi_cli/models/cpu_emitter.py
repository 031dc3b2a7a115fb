"""Emits what all layers of a decoder have in common as operations of a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tgi_cli.attention import KVSpec
from tgi_cli.kernels.linear import Epilogue
from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.kernels.program import Program
from tgi_cli.kernels.program_args import NormKind
from tgi_cli.kernels.program_parts import RESIDUAL, BufferView, NormWeights
from tgi_cli.layers import LayerNorm, RMSNorm
from tgi_cli.layers.linear import LinearBase
from tgi_cli.quantization.matmul import ConcatMatmul


class UnsupportedLayer(Exception):
    """No operation computes a part of the model; the message names the part."""


@dataclass(frozen=True, slots=True)
class Output:
    """The buffer and the epilogue of a block's result."""

    target: BufferView
    epilogue: Epilogue = Epilogue.STORE
    scale: float = 1.0


class Emitter:
    """Adds linear layers and norms to a program, and has its buffers.

    As in the modules, a block's output waits in ``branch`` for the norm after it, which adds it
    to the residual, unless the block's last product can add it at once.

    Args:
        hidden_size: width of hidden states of the model.
        kv_specs: specifications of its KV caches.
        residual_size: default: ``hidden_size``.
        per_layer_size: width of a token's embeddings for all layers.
    """

    def __init__(
        self,
        hidden_size: int,
        kv_specs: Sequence[KVSpec],
        residual_size: int | None = None,
        per_layer_size: int = 0,
    ) -> None:
        self.hidden_size = hidden_size
        self.kv_specs = kv_specs
        self.program = Program(hidden_size, residual_size, per_layer_size)
        self.normed = self.program.buffer(hidden_size)
        self.branch = self.program.buffer(hidden_size)
        self.waiting: tuple[BufferView, float] | None = None
        """A branch that was not added to the residual yet, and its factor."""
        self._buffers: dict[tuple[str, int], BufferView] = {}

    def buffer(self, name: str, width: int) -> BufferView:
        """A buffer that all layers of that width share."""
        if (name, width) not in self._buffers:
            self._buffers[name, width] = self.program.buffer(width)
        return self._buffers[name, width]

    def take_waiting(self, label: str, norm: nn.Module | None, target: BufferView) -> BufferView:
        """Emit the norm before a block, which adds a waiting branch; returns its buffer."""
        waiting, self.waiting = self.waiting, None
        if waiting is None:
            if norm is None:
                return RESIDUAL
            self.norm(label, norm, RESIDUAL, target)
            return target
        source, scale = waiting
        if norm is None:
            self.add(label, source, RESIDUAL, scale)
            return RESIDUAL
        self.norm(label, norm, source, target, RESIDUAL, scale)
        return target

    def add(self, label: str, source: BufferView, target: BufferView, scale: float = 1.0) -> None:
        """target += scale * source."""
        nothing = NormWeights(NormKind.NONE, self.hidden_size)
        self.program.norm(label, source, target, nothing, target, scale)

    def scale(
        self, label: str, source: BufferView, target: BufferView, factor: float | Tensor
    ) -> None:
        """target = factor * source; ``factor`` is one number."""
        by = torch.full((self.hidden_size,), float(factor), dtype=torch.float32)
        self.program.multiply(label, source, target, by, self.hidden_size)

    def norm(
        self,
        label: str,
        norm: nn.Module,
        source: BufferView,
        target: BufferView,
        residual: BufferView | None = None,
        scale: float = 1.0,
    ) -> None:
        """target = norm of source, or of residual += scale * source."""
        if not isinstance(norm, RMSNorm | LayerNorm):
            raise UnsupportedLayer(f"{label}: {type(norm).__name__}")
        bias = norm.bias if isinstance(norm, LayerNorm) else None
        weights = NormWeights(
            NormKind.RMS if isinstance(norm, RMSNorm) else NormKind.LAYER,
            norm.size,
            norm.weight.float(),
            None if bias is None else bias.float(),
            norm.eps,
        )
        self.program.norm(label, source, target, weights, residual, scale)

    def linear(
        self,
        label: str,
        layer: LinearBase,
        source: BufferView,
        target: BufferView,
        epilogue: Epilogue = Epilogue.STORE,
        activation: int = 0,
        scale: float = 1.0,
    ) -> None:
        """target = epilogue(layer(source)).

        A layer whose outputs are packed in parts of several formats is a product for each.
        """
        parts = _packed_parts(layer)
        if not parts:
            raise UnsupportedLayer(f"{label}: its weight is not packed for the kernels")
        if epilogue is Epilogue.GATED and not (len(parts) == 1 and parts[0][1].paired):
            raise UnsupportedLayer(f"{label}: gate and up are not packed in pairs")
        bias = None if layer.bias is None else layer.bias.detach()
        if bias is not None and bias.dtype != torch.bfloat16:
            raise UnsupportedLayer(f"{label}: a bias in {bias.dtype}")
        for first, matrix in parts:
            self.program.linear(
                label,
                source,
                target.at(first),
                matrix,
                None if bias is None else bias[first : first + matrix.out],
                epilogue=epilogue,
                activation=activation,
                scale=scale,
            )

    def project(self, label: str, layer: LinearBase, source: BufferView, output: Output) -> None:
        """The last product of a block."""
        target, epilogue, scale = output.target, output.epilogue, output.scale
        self.linear(label, layer, source, target, epilogue, scale=scale)


def _packed_parts(layer: LinearBase) -> list[tuple[int, PackedMatrix]]:
    """First outputs and matrices of a layer; empty if a part is not packed for the kernels."""
    packed: object = layer.packed
    if isinstance(packed, PackedMatrix):
        return [(0, packed)]
    return packed.matrices if isinstance(packed, ConcatMatmul) else []
