"""Emits layers that compute one of several streams (Gemma 3n) as operations of a program."""

from __future__ import annotations

from torch import nn

from tgi_cli.kernels.linear import ACTIVATIONS, Epilogue
from tgi_cli.kernels.program_parts import RESIDUAL, BufferView, Mix, Rope
from tgi_cli.layers import AltUp
from tgi_cli.layers.linear import LinearBase
from tgi_cli.models.cpu_emitter import Emitter, Output
from tgi_cli.models.cpu_mixers import emit_mixer
from tgi_cli.models.cpu_mlp import emit_mlp, emit_per_layer
from tgi_cli.models.decoder import AltUpLayer


def emit_altup_layer(emitter: Emitter, label: str, layer: AltUpLayer, rope: Rope | None) -> None:
    """Add the operations of a layer; the residual has a token's streams side by side.

    Raises:
        UnsupportedLayer: there are none for a part of it.
    """
    altup, size, program = layer.altup, emitter.hidden_size, emitter.program
    assert layer.input_norm is not None
    assert layer.mlp_norm is not None
    assert layer.mixer is not None
    assert layer.mlp is not None
    predictions = emitter.buffer("predictions", altup.num_streams * size)
    mixed, laurel = emitter.buffer("mixed", size), emitter.buffer("laurel", size)
    first = altup.active * size
    branch, normed = emitter.branch, emitter.normed

    factors = _modalities(emitter, label, altup, altup.prediction_coefs, RESIDUAL.at(first))
    predicted = Mix(altup.num_streams, altup.num_streams, size)
    program.mix(f"{label}.predict", RESIDUAL, RESIDUAL, factors, predictions, predicted)

    active = predictions.at(first)
    emitter.norm(f"{label}.input_norm", layer.input_norm, active, normed)
    mixer_label = f"{label}.{layer.mixer_name}"
    emit_mixer(emitter, mixer_label, layer.mixer, rope, normed, Output(mixed))
    _output_norm(emitter, f"{label}.mixer_output_norm", layer.mixer_output_norm, mixed)
    low_rank = emitter.buffer("low_rank", altup.laurel_left.out_features)
    emitter.linear(f"{label}.laurel_left", altup.laurel_left, normed, low_rank)
    emitter.linear(f"{label}.laurel_right", altup.laurel_right, low_rank, laurel)
    emitter.norm(f"{label}.laurel_norm", altup.laurel_norm, laurel, laurel)
    emitter.add(f"{label}.laurel", normed, laurel)
    emitter.add(f"{label}.mixed", active, mixed)
    emitter.add(f"{label}.mixed", laurel, mixed)
    emitter.scale(f"{label}.mixed", mixed, mixed, layer.MIXED_SCALE)

    emitter.norm(f"{label}.mlp_norm", layer.mlp_norm, mixed, normed)
    emit_mlp(emitter, f"{label}.mlp", layer.mlp, normed, Output(branch))
    _output_norm(emitter, f"{label}.mlp_output_norm", layer.mlp_output_norm, branch)
    emitter.add(f"{label}.computed", branch, mixed)

    factors = _modalities(emitter, label, altup, altup.correction_coefs, mixed)
    emitter.add(f"{label}.innovation", active, mixed, -1.0)
    corrected = Mix(altup.num_streams, 1, size, 1.0)
    program.mix(f"{label}.correct", mixed, predictions, factors, RESIDUAL, corrected)

    if layer.per_layer is not None:
        gate = RESIDUAL.at(first)
        if altup.output_scale is not None:
            weight = altup.output_scale.weight.float()
            program.multiply(f"{label}.output_scale", gate, mixed, weight, size)
            gate = mixed
        emit_per_layer(emitter, f"{label}.per_layer", layer.per_layer, layer.index, gate)
        for stream in range(1, altup.num_streams):
            emitter.add(f"{label}.per_layer", branch, RESIDUAL.at(stream * size))


def _modalities(
    emitter: Emitter, label: str, altup: AltUp, coefs: LinearBase, active: BufferView
) -> BufferView:
    """The factors that ``coefs`` make of the active stream."""
    normed, count = emitter.normed, altup.num_streams
    routed = emitter.buffer("modalities", count)
    factors = emitter.buffer("factors", coefs.out_features)
    emitter.norm(f"{label}.router_norm", altup.router_norm, active, normed)
    emitter.scale(f"{label}.router_norm", normed, normed, altup.router_scale)
    tanh = ACTIVATIONS["tanh"]
    router = altup.modality_router
    emitter.linear(f"{label}.router", router, normed, routed, Epilogue.ACTIVATE, tanh)
    emitter.linear(f"{label}.coefs", coefs, routed, factors)
    return factors


def _output_norm(emitter: Emitter, label: str, norm: nn.Module | None, block: BufferView) -> None:
    if norm is not None:
        emitter.norm(label, norm, block, block)
