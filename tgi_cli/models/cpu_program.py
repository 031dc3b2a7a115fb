"""A decoder's layers as one program for the C++ kernels: the CPU's equivalent of a CUDA graph.

The program computes what the modules compute, with the same roundings. The modules remain the
oracle, and run models whose weights are not packed for the kernels, models with several shards, and
steps with adapters. A stage of a pipeline has a program of its own layers. Mixtures of experts that
no operation computes run as modules between the parts of a program.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tgi_cli.attention import PagedAttention, StateCache
from tgi_cli.attention.cpu_cpp import CppAttention
from tgi_cli.kernels.linear import Epilogue
from tgi_cli.kernels.program_args import ProgramInputs, rope_pointers
from tgi_cli.kernels.program_parts import OUTPUT, RESIDUAL, Rope
from tgi_cli.layers import RotaryEmbedding, Streams
from tgi_cli.layers.moe import MLPAndExperts, MoE
from tgi_cli.models.base import CapturedStates, CausalLM, ImageRows
from tgi_cli.models.cpu_emitter import Emitter, Output, UnsupportedLayer
from tgi_cli.models.cpu_mixers import emit_mixer
from tgi_cli.models.cpu_mlp import emit_mlp, emit_per_layer
from tgi_cli.models.cpu_streams import emit_altup_layer
from tgi_cli.models.decoder import (
    AltUpLayer,
    DecoderForCausalLM,
    DecoderLayer,
    DecoderModel,
    Norm,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExpertsPart:
    """Experts that run as a module after a part: residual += scale * norm(experts)."""

    module: nn.Module
    takes_residual: bool
    """Whether it has its own norms; otherwise its input is the part's normed result."""
    norm: Norm | None
    scale: float

    def add(self, result: Tensor, residual: Tensor) -> None:
        """Add the experts after a part with that ``result``, as a :class:`DecoderLayer` does."""
        added = self.module(residual if self.takes_residual else result)
        if self.norm is not None:
            added = self.norm(added)
        residual.add_(added if self.scale == 1.0 else added.mul_(self.scale))


@dataclass(frozen=True, slots=True)
class DeepstackPart:
    """Where a program may stop after a layer to whose output features of images are added."""

    layer: int


@dataclass(frozen=True, slots=True)
class CapturePart:
    """Where a program stops for the input of a layer: it is the residual there."""

    layer: int


class CpuProgram:
    """Runs a decoder's layers as one program; the result is that of the model's ``forward``.

    Args:
        model: loaded.
        captured_layers: those whose inputs :meth:`forward_capturing` gives.
    """

    def __init__(self, model: DecoderModel, captured_layers: Sequence[int] = ()) -> None:
        compiler = _Compiler(model, captured_layers)
        self.program = compiler.emitter.program
        self._between = compiler.between
        self._model = model
        self._states: tuple[Any, Any] = (None, None)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        images: ImageRows | None = None,
    ) -> Tensor:
        """See :meth:`tgi_cli.models.CausalLM.forward`; for steps without adapters."""
        return self._forward(input_ids, positions, attention, None, images)

    def forward_capturing(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        captured: CapturedStates,
        images: ImageRows | None = None,
    ) -> Tensor:
        """See :meth:`tgi_cli.models.CausalLM.forward_capturing`; for ``captured_layers``."""
        return self._forward(input_ids, positions, attention, captured, images)

    def _forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        captured: CapturedStates | None,
        images: ImageRows | None,
    ) -> Tensor:
        assert isinstance(attention, CppAttention)
        hidden, given = self._model.embed(input_ids, positions, images)
        inputs = ProgramInputs(
            step=attention.step,
            caches=attention.caches,
            ropes=rope_pointers(given.rotations),
            per_layer=given.per_layer,
        )
        if attention.states is not None:
            assert attention.states.step is not None
            inputs.slots = attention.states.step.for_kernels().args
            inputs.states = self._pointers(attention.states)
        if self._model.streams is not None:
            return self._forward_streams(self._model.streams, hidden, inputs)
        levels, first = 0 if images is None else len(images.deepstack), 0
        for part, between in enumerate(self._between):
            if isinstance(between, DeepstackPart) and between.layer >= levels:
                continue  # nothing is added: this part runs together with the next one
            result = self.program.run(hidden, inputs, first, part + 1)
            first = part + 1
            if isinstance(between, ExpertsPart):
                between.add(result, hidden)
            elif isinstance(between, DeepstackPart):
                assert images is not None
                images.add_deepstack(between.layer, hidden)
            elif captured is not None:
                captured.offer(between.layer, hidden)
        output = self.program.run(hidden, inputs, first, len(self._between) + 1)
        if self._model.shard.is_last:
            return output
        self._model.shard.send(hidden)  # the residual, in which all is added up
        return hidden

    def _forward_streams(self, streams: Streams, hidden: Tensor, inputs: ProgramInputs) -> Tensor:
        """Run the program with a token's streams side by side in the residual."""
        residual = streams.open(hidden).transpose(0, 1).contiguous()
        self.program.run(residual.flatten(1), inputs)
        output: Tensor = self._model.norm(streams.close(residual.transpose(0, 1).contiguous()))
        return output

    def _pointers(self, states: StateCache) -> Any:
        """Pointers to each layer's states of its convolution and of its recurrence."""
        tensors, pointers = self._states
        if tensors is not states.tensors:
            found = [layer.get(name) for layer in states.tensors for name in ("conv", "recurrent")]
            addresses = (None if each is None else each.data_ptr() for each in found)
            pointers = (c_void_p * len(found))(*addresses)
            self._states = states.tensors, pointers
        return pointers


def compile_program(
    model: CausalLM, attention: PagedAttention, captured_layers: Sequence[int] = ()
) -> CpuProgram | None:
    """The program of a loaded model over ``attention``; None if its modules have to run.

    ``captured_layers`` are layers whose inputs it returns, if the model ``captures_states``.
    """
    if not isinstance(model, DecoderForCausalLM) or not isinstance(attention, CppAttention):
        return None
    if model.model.shard.size > 1:
        return None
    try:
        return CpuProgram(model.model, captured_layers)
    except UnsupportedLayer as reason:
        log.debug("no program for this model: %s", reason)
        return None


class _Compiler:
    """Emits a model's operations in one pass."""

    def __init__(self, model: DecoderModel, captured_layers: Sequence[int]) -> None:
        size = model.hidden_size
        self._captured = frozenset(captured_layers)
        self.emitter = Emitter(
            size,
            model.caches.kv,
            None if model.streams is None else size * (1 + len(model.streams.split)),
            0 if model.per_layer is None else len(model.layers) * model.per_layer.width,
        )
        self.between: list[ExpertsPart | CapturePart | DeepstackPart] = []
        """What is done after each part but the last."""
        ropes = [
            Rope(index, 2 * len(rope.frequencies) if isinstance(rope, RotaryEmbedding) else 0)
            for index, rope in enumerate(model.ropes)
        ]
        for layer in model.layers:
            assert isinstance(layer, DecoderLayer)
            path = f"layers.{layer.index}"
            self._capture(layer.index)
            rope = None if layer.rope is None else ropes[layer.rope]
            if isinstance(layer, AltUpLayer):
                emit_altup_layer(self.emitter, path, layer, rope)
                continue
            self._layer(layer, path, rope)
            self._finish_layer(layer, path)
            if layer.index < model.deepstack:
                self.emitter.take_waiting(f"{path}.deepstack", None, RESIDUAL)
                self.emitter.program.cut()
                self.between.append(DeepstackPart(layer.index))
        self._capture(len(model.layers))
        if not model.shard.is_last:
            self.emitter.take_waiting("stage", None, RESIDUAL)
        elif model.streams is None:
            self.emitter.take_waiting("norm", model.norm, OUTPUT)
        self.emitter.program.seal()

    def _capture(self, layer: int) -> None:
        """Stop where the input of a layer is complete, if it is wanted."""
        if layer in self._captured:
            self.emitter.take_waiting(f"layers.{layer}.capture", None, RESIDUAL)
            self.emitter.program.cut()
            self.between.append(CapturePart(layer))

    def _finish_layer(self, layer: DecoderLayer, path: str) -> None:
        """Emit what follows mixer and MLP: the layer's own embedding, and its factor."""
        emitter = self.emitter
        if layer.per_layer is not None:
            source = emitter.take_waiting(f"{path}.add", None, RESIDUAL)
            emit_per_layer(emitter, f"{path}.per_layer", layer.per_layer, layer.index, source)
            emitter.waiting = (emitter.branch, 1.0)
        if layer.scalar is not None:
            source = emitter.take_waiting(f"{path}.add", None, RESIDUAL)
            emitter.scale(f"{path}.scalar", source, source, layer.scalar.weight)

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
            # Nothing waits for the residual here: the norm above has added it.
            output = Output(emitter.branch, Epilogue.ADD)
            emit_mlp(emitter, f"{path}.mlp", mlp, emitter.normed, output)
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
        if isinstance(mlp, MoE) and mlp.whole is not None and mlp.whole.makes_logits:
            whole = mlp.whole
            source = emitter.take_waiting(f"{path}.mlp_norm", layer.mlp_norm, emitter.normed)
            emitter.program.experts(f"{path}.experts", source, emitter.branch, whole)
            if layer.mlp_output_norm is not None:
                norm = layer.mlp_output_norm
                emitter.norm(f"{path}.mlp_output_norm", norm, emitter.branch, emitter.branch)
            emitter.waiting = (emitter.branch, scale)
        elif isinstance(mlp, MoE | MLPAndExperts):
            given = emitter.take_waiting(f"{path}.mlp_norm", layer.mlp_norm, OUTPUT)
            emitter.program.cut()
            part = ExpertsPart(mlp, given == RESIDUAL, layer.mlp_output_norm, scale)
            self.between.append(part)
        elif mlp is not None:
            source = emitter.take_waiting(f"{path}.mlp_norm", layer.mlp_norm, emitter.normed)
            self._block(
                layer.mlp_output_norm,
                f"{path}.mlp_output_norm",
                scale,
                lambda output: emit_mlp(emitter, f"{path}.mlp", mlp, source, output),
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
