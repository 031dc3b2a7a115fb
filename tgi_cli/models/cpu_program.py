"""A decoder's layers as one program for the C++ kernels: what a CUDA graph is to a GPU.

The program computes what the modules compute, with the same roundings. The modules remain the
oracle, and run models with layers that no operation of the program computes, models with several
shards, and steps with adapters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tgi_cli.attention import PagedAttention
from tgi_cli.attention.cpu_cpp import CppAttention
from tgi_cli.kernels.linear import ACTIVATIONS, Epilogue, PackedMatrix
from tgi_cli.kernels.program import (
    OUTPUT,
    RESIDUAL,
    BufferView,
    HeadLayout,
    NormKind,
    NormWeights,
    Program,
)
from tgi_cli.layers import MLP, Attention, GatedMLP, LayerNorm, RMSNorm, RotaryEmbedding
from tgi_cli.layers.linear import LinearBase
from tgi_cli.models.base import CausalLM
from tgi_cli.models.decoder import DecoderForCausalLM, DecoderLayer, DecoderModel, Norm

log = logging.getLogger(__name__)


class CpuProgram:
    """Runs a decoder's layers as one program; the result is that of the model's ``forward``."""

    def __init__(self, model: DecoderModel) -> None:
        self.program = _Compiler(model).program
        self._model = model

    def forward(self, input_ids: Tensor, positions: Tensor, attention: PagedAttention) -> Tensor:
        """See :meth:`tgi_cli.models.CausalLM.forward`; for steps without adapters."""
        assert isinstance(attention, CppAttention)
        hidden, rotations = self._model.embed(input_ids, positions)
        return self.program.run(hidden, attention.step, attention.caches, rotations)


def compile_program(model: CausalLM, attention: PagedAttention) -> CpuProgram | None:
    """The program of a loaded model over ``attention``; None if its modules have to run."""
    if not isinstance(model, DecoderForCausalLM) or not isinstance(attention, CppAttention):
        return None
    if model.model.embed_tokens.shard.size > 1:
        return None
    try:
        return CpuProgram(model.model)
    except _Unsupported as reason:
        log.debug("no program for this model: %s", reason)
        return None


class _Unsupported(Exception):
    """No operation computes a part of the model; the message names the part."""


class _Compiler:
    """Emits a model's operations in one pass.

    As in the modules, a block's output waits in ``branch`` for the norm behind it, which adds it
    to the residual, unless the block's last product can add it at once.
    """

    def __init__(self, model: DecoderModel) -> None:
        self.hidden_size = hidden_size = model.norm.size
        self.program = Program(hidden_size)
        self.normed = self.program.buffer(hidden_size)
        self.branch = self.program.buffer(hidden_size)
        self.waiting: tuple[BufferView, float] | None = None
        """A branch that is not in the residual yet, and its factor."""
        self._buffers: dict[tuple[str, int], BufferView] = {}
        self.rotated = {
            index: 2 * len(rope.frequencies)
            for index, rope in enumerate(model.ropes)
            if isinstance(rope, RotaryEmbedding)
        }
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, DecoderLayer)
            self._layer(layer, f"layers.{index}")
        self._norm("norm", model.norm, OUTPUT)
        self.program.seal()

    def _layer(self, layer: DecoderLayer, path: str) -> None:
        normed = self._norm(f"{path}.input_norm", layer.input_norm, self.normed)
        attention, mlp = layer.mixer, layer.mlp
        if not isinstance(attention, Attention) or mlp is None:
            raise _Unsupported(f"{path}: {type(attention).__name__} and {type(mlp).__name__}")
        if attention.output_gate:
            raise _Unsupported(f"{path}: a gate on the output of attention")
        if not attention.plain or attention.slopes is not None:
            raise _Unsupported(f"{path}: attention of another form")
        if layer.rope is not None and layer.rope not in self.rotated:
            raise _Unsupported(f"{path}: queries that grow with their position")
        if type(layer) is not DecoderLayer or layer.per_layer is not None or layer.scalar:
            raise _Unsupported(f"{path}: more than a mixer and an MLP")
        scale = layer.residual_scale
        if layer.parallel:
            self._attention(f"{path}.self_attn", attention, layer.rope, normed, self.branch)
            if layer.mlp_norm is not None:
                self._plain_norm(f"{path}.mlp_norm", layer.mlp_norm, RESIDUAL, self.normed)
            elif normed == RESIDUAL:
                raise _Unsupported(f"{path}: parallel blocks without a norm")
            # The residual still lacks what waits there: nothing, since the norm above added it.
            self._mlp(f"{path}.mlp", mlp, self.normed, self.branch, Epilogue.ADD)
            self.waiting = (self.branch, 1.0)
            return
        self._block(
            layer.mixer_output_norm,
            f"{path}.mixer_output_norm",
            scale,
            lambda target, epilogue, factor: self._attention(
                f"{path}.self_attn", attention, layer.rope, normed, target, epilogue, factor
            ),
        )
        normed = self._norm(f"{path}.mlp_norm", layer.mlp_norm, self.normed)
        self._block(
            layer.mlp_output_norm,
            f"{path}.mlp_output_norm",
            scale,
            lambda target, epilogue, factor: self._mlp(
                f"{path}.mlp", mlp, normed, target, epilogue, factor
            ),
        )

    def _block(
        self,
        norm: Norm | None,
        label: str,
        scale: float,
        emit: Callable[[BufferView, Epilogue, float], None],
    ) -> None:
        if norm is None:
            emit(RESIDUAL, Epilogue.ADD, scale)
            return
        emit(self.branch, Epilogue.STORE, 1.0)
        self._plain_norm(label, norm, self.branch, self.branch)
        self.waiting = (self.branch, scale)

    def _norm(self, label: str, norm: Norm | None, target: BufferView) -> BufferView:
        """The norm before a block, which takes in what waits; returns where its result is."""
        waiting, self.waiting = self.waiting, None
        if waiting is None:
            if norm is None:
                return RESIDUAL
            self._plain_norm(label, norm, RESIDUAL, target)
            return target
        source, scale = waiting
        if norm is None:
            nothing = NormWeights(NormKind.NONE, self.hidden_size)
            self.program.norm(label, source, target, nothing, RESIDUAL, scale)
            return RESIDUAL
        self._plain_norm(label, norm, source, target, RESIDUAL, scale)
        return target

    def _plain_norm(
        self,
        label: str,
        norm: nn.Module,
        source: BufferView,
        target: BufferView,
        residual: BufferView | None = None,
        scale: float = 1.0,
    ) -> None:
        if not isinstance(norm, RMSNorm | LayerNorm):
            raise _Unsupported(f"{label}: {type(norm).__name__}")
        bias = norm.bias if isinstance(norm, LayerNorm) else None
        weights = NormWeights(
            NormKind.RMS if isinstance(norm, RMSNorm) else NormKind.LAYER,
            norm.size,
            norm.weight.float(),
            None if bias is None else bias.float(),
            norm.eps,
        )
        self.program.norm(label, source, target, weights, residual, scale)

    def _attention(
        self,
        label: str,
        attention: Attention,
        rope: int | None,
        source: BufferView,
        target: BufferView,
        epilogue: Epilogue = Epilogue.STORE,
        scale: float = 1.0,
    ) -> None:
        num_heads, num_kv_heads = attention.heads
        dims = attention.head_dim
        heads = HeadLayout(attention.layer, num_heads, num_kv_heads, dims)
        qkv = self._buffer("qkv", (num_heads + 2 * num_kv_heads) * dims)
        attended = self._buffer("attended", num_heads * dims)
        self._linear(f"{label}.qkv_proj", attention.qkv_proj, source, qkv, Epilogue.STORE)
        weight, eps = None, 0.0
        if attention.q_norm is not None and attention.k_norm is not None:
            keys = qkv.at(num_heads * dims)
            self._plain_norm(f"{label}.q_norm", attention.q_norm, qkv, qkv)
            self._plain_norm(f"{label}.k_norm", attention.k_norm, keys, keys)
        elif attention.qk_norm is not None:
            weight, eps = attention.qk_norm.weight.float(), attention.qk_norm.eps
        self.program.rotate(
            f"{label}.rotate",
            qkv,
            heads,
            rope=rope,
            rotated=0 if rope is None else self.rotated[rope],
            weight=weight,
            eps=eps,
        )
        self.program.attend(
            f"{label}.attend",
            qkv,
            attended,
            heads,
            scale=attention.scale,
            window=attention.kv_spec.window,
            chunk=attention.kv_spec.chunk,
            softcap=attention.softcap,
            sinks=None if attention.sinks is None else attention.sinks.weight.float(),
        )
        self._linear(f"{label}.o_proj", attention.o_proj, attended, target, epilogue, scale=scale)

    def _mlp(
        self,
        label: str,
        mlp: nn.Module,
        source: BufferView,
        target: BufferView,
        epilogue: Epilogue,
        scale: float = 1.0,
    ) -> None:
        if not isinstance(mlp, GatedMLP | MLP):
            raise _Unsupported(f"{label}: {type(mlp).__name__}")
        if isinstance(mlp, GatedMLP) and mlp.cutoff is not None:
            raise _Unsupported(f"{label}: sparse gates")
        if mlp.activation not in ACTIVATIONS:
            raise _Unsupported(f"{label}: {mlp.activation}")
        activation = ACTIVATIONS[mlp.activation]
        inner = self._buffer("inner", mlp.down_proj.in_features)
        if isinstance(mlp, GatedMLP):
            up, kind = mlp.gate_up_proj, Epilogue.GATED
        else:
            up, kind = mlp.up_proj, Epilogue.ACTIVATE
        self._linear(f"{label}.up", up, source, inner, kind, activation)
        self._linear(f"{label}.down", mlp.down_proj, inner, target, epilogue, scale=scale)

    def _linear(
        self,
        label: str,
        layer: LinearBase,
        source: BufferView,
        target: BufferView,
        epilogue: Epilogue,
        activation: int = 0,
        scale: float = 1.0,
    ) -> None:
        matrix = layer.packed
        if not isinstance(matrix, PackedMatrix):
            raise _Unsupported(f"{label}: its weight is not packed for the kernels")
        if epilogue is Epilogue.GATED and not matrix.paired:
            raise _Unsupported(f"{label}: gate and up are not packed in pairs")
        bias = None if layer.bias is None else layer.bias.detach()
        if bias is not None and bias.dtype != torch.bfloat16:
            raise _Unsupported(f"{label}: a bias in {bias.dtype}")
        self.program.linear(
            label,
            source,
            target,
            matrix,
            bias,
            epilogue=epilogue,
            activation=activation,
            scale=scale,
        )

    def _buffer(self, name: str, width: int) -> BufferView:
        """One for all layers of that width."""
        if (name, width) not in self._buffers:
            self._buffers[name, width] = self.program.buffer(width)
        return self._buffers[name, width]
