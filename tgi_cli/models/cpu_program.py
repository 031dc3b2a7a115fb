"""A decoder's layers as one program for the C++ kernels: what a CUDA graph is to a GPU.

The program computes what the modules compute, with the same roundings. The modules remain the
oracle, and run models with layers that no operation of the program computes, models with several
shards, and steps with adapters. Experts, which depend on what a router chooses, run as modules
between the parts of a program.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tgi_cli.attention import PagedAttention, StateCache
from tgi_cli.attention.cpu_cpp import CppAttention
from tgi_cli.kernels.linear import ACTIVATIONS, Epilogue
from tgi_cli.kernels.program import OUTPUT, RESIDUAL, BufferView, ProgramInputs
from tgi_cli.layers import MLP, GatedMLP, RotaryEmbedding
from tgi_cli.layers.moe import MoE
from tgi_cli.models.base import CausalLM
from tgi_cli.models.cpu_emitter import Emitter, UnsupportedLayer
from tgi_cli.models.cpu_mixers import Output, Rope, emit_mixer
from tgi_cli.models.decoder import DecoderForCausalLM, DecoderLayer, DecoderModel, Norm

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExpertsPart:
    """What runs as a module behind a part of the program: residual += scale * norm(experts)."""

    module: nn.Module
    norm: Norm | None
    scale: float

    def add(self, normed: Tensor, residual: Tensor) -> None:
        """Add the experts of ``normed``, as a :class:`DecoderLayer` does."""
        added = self.module(normed)
        if self.norm is not None:
            added = self.norm(added)
        residual.add_(added if self.scale == 1.0 else added.mul_(self.scale))


class CpuProgram:
    """Runs a decoder's layers as one program; the result is that of the model's ``forward``."""

    def __init__(self, model: DecoderModel) -> None:
        compiler = _Compiler(model)
        self.program = compiler.emitter.program
        self._experts = compiler.experts
        self._model = model
        self._states: tuple[Any, Any] = (None, None)

    def forward(self, input_ids: Tensor, positions: Tensor, attention: PagedAttention) -> Tensor:
        """See :meth:`tgi_cli.models.CausalLM.forward`; for steps without adapters."""
        assert isinstance(attention, CppAttention)
        hidden, rotations = self._model.embed(input_ids, positions)
        # A model that scales queries by position has no program.
        rotary = [each for each in rotations if isinstance(each, tuple)]
        inputs = ProgramInputs.of(attention.step, attention.caches, rotary)
        if attention.states is not None:
            assert attention.states.step is not None
            inputs.slots = attention.states.step.for_kernels().args
            inputs.states = self._pointers(attention.states)
        for part, experts in enumerate(self._experts):
            experts.add(self.program.run(hidden, inputs, part), hidden)
        return self.program.run(hidden, inputs, len(self._experts))

    def _pointers(self, states: StateCache) -> Any:
        """To each layer's states of its convolution, and of its recurrence."""
        tensors, pointers = self._states
        if tensors is not states.tensors:
            found = [layer.get(name) for layer in states.tensors for name in ("conv", "recurrent")]
            addresses = (None if each is None else each.data_ptr() for each in found)
            pointers = (c_void_p * len(found))(*addresses)
            self._states = states.tensors, pointers
        return pointers


def compile_program(model: CausalLM, attention: PagedAttention) -> CpuProgram | None:
    """The program of a loaded model over ``attention``; None if its modules have to run."""
    if not isinstance(model, DecoderForCausalLM) or not isinstance(attention, CppAttention):
        return None
    if model.model.embed_tokens.shard.size > 1:
        return None
    try:
        return CpuProgram(model.model)
    except UnsupportedLayer as reason:
        log.debug("no program for this model: %s", reason)
        return None


class _Compiler:
    """Emits a model's operations in one pass."""

    def __init__(self, model: DecoderModel) -> None:
        self.emitter = Emitter(model.norm.size)
        self.experts: list[ExpertsPart] = []
        ropes = {
            index: Rope(index, 2 * len(rope.frequencies))
            for index, rope in enumerate(model.ropes)
            if isinstance(rope, RotaryEmbedding)
        }
        for index, layer in enumerate(model.layers):
            path = f"layers.{index}"
            if type(layer) is not DecoderLayer or layer.per_layer is not None or layer.scalar:
                raise UnsupportedLayer(f"{path}: more than a mixer and an MLP")
            if layer.rope is not None and layer.rope not in ropes:
                raise UnsupportedLayer(f"{path}: queries that grow with their position")
            self._layer(layer, path, None if layer.rope is None else ropes[layer.rope])
        self.emitter.take_waiting("norm", model.norm, OUTPUT)
        self.emitter.program.seal()

    def _layer(self, layer: DecoderLayer, path: str, rope: Rope | None) -> None:
        mixer, mlp, scale, emitter = layer.mixer, layer.mlp, layer.residual_scale, self.emitter
        label = f"{path}.{layer.mixer_name}"
        if layer.parallel and mixer is not None and mlp is not None:
            normed = emitter.take_waiting(f"{path}.input_norm", layer.input_norm, emitter.normed)
            emit_mixer(emitter, label, mixer, rope, normed, Output(emitter.branch))
            if layer.mlp_norm is not None:
                emitter.norm(f"{path}.mlp_norm", layer.mlp_norm, RESIDUAL, emitter.normed)
            elif normed == RESIDUAL:
                raise UnsupportedLayer(f"{path}: parallel blocks without a norm")
            # The residual still lacks what waits there: nothing, since the norm above added it.
            output = Output(emitter.branch, Epilogue.ADD)
            self._mlp(f"{path}.mlp", mlp, emitter.normed, output)
            emitter.waiting = (emitter.branch, 1.0)
            return
        if mixer is not None:
            normed = emitter.take_waiting(f"{path}.input_norm", layer.input_norm, emitter.normed)
            self._block(
                layer.mixer_output_norm,
                f"{path}.mixer_output_norm",
                scale,
                lambda output: emit_mixer(emitter, label, mixer, rope, normed, output),
            )
        if isinstance(mlp, MoE):
            if layer.mlp_norm is None:
                raise UnsupportedLayer(f"{path}: experts without a norm before them")
            emitter.take_waiting(f"{path}.mlp_norm", layer.mlp_norm, OUTPUT)
            emitter.program.cut()
            self.experts.append(ExpertsPart(mlp, layer.mlp_output_norm, scale))
        elif mlp is not None:
            source = emitter.take_waiting(f"{path}.mlp_norm", layer.mlp_norm, emitter.normed)
            self._block(
                layer.mlp_output_norm,
                f"{path}.mlp_output_norm",
                scale,
                lambda output: self._mlp(f"{path}.mlp", mlp, source, output),
            )

    def _block(
        self, norm: Norm | None, label: str, scale: float, emit: Callable[[Output], None]
    ) -> None:
        if norm is None:
            emit(Output(RESIDUAL, Epilogue.ADD, scale))
            return
        emit(Output(self.emitter.branch))
        self.emitter.norm(label, norm, self.emitter.branch, self.emitter.branch)
        self.emitter.waiting = (self.emitter.branch, scale)

    def _mlp(self, label: str, mlp: nn.Module, source: BufferView, output: Output) -> None:
        if not isinstance(mlp, GatedMLP | MLP):
            raise UnsupportedLayer(f"{label}: {type(mlp).__name__}")
        if isinstance(mlp, GatedMLP) and mlp.cutoff is not None:
            raise UnsupportedLayer(f"{label}: sparse gates")
        if mlp.activation not in ACTIVATIONS:
            raise UnsupportedLayer(f"{label}: {mlp.activation}")
        activation = ACTIVATIONS[mlp.activation]
        inner = self.emitter.buffer("inner", mlp.down_proj.in_features)
        if isinstance(mlp, GatedMLP):
            up, kind = mlp.gate_up_proj, Epilogue.GATED
        else:
            up, kind = mlp.up_proj, Epilogue.ACTIVATE
        self.emitter.linear(f"{label}.up", up, source, inner, kind, activation)
        target, epilogue, scale = output.target, output.epilogue, output.scale
        self.emitter.linear(f"{label}.down", mlp.down_proj, inner, target, epilogue, scale=scale)
