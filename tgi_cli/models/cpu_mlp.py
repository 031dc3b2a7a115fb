"""Emits feed-forward blocks and per-layer embeddings as operations of a program."""

from __future__ import annotations

from torch import nn

from tgi_cli.kernels.linear import ACTIVATIONS, Epilogue
from tgi_cli.kernels.program_parts import PER_LAYER, BufferView
from tgi_cli.layers import MLP, GatedMLP, PerLayerInput
from tgi_cli.models.cpu_emitter import Emitter, Output, UnsupportedLayer


def emit_mlp(
    emitter: Emitter, label: str, mlp: nn.Module, source: BufferView, output: Output
) -> None:
    """Add the operations of a feed-forward block.

    Raises:
        UnsupportedLayer: there are none for it.
    """
    if not isinstance(mlp, GatedMLP | MLP):
        raise UnsupportedLayer(f"{label}: {type(mlp).__name__}")
    activation = _activation(label, mlp.activation)
    width = mlp.down_proj.in_features
    inner = emitter.buffer("inner", width)
    if isinstance(mlp, MLP):
        kind = Epilogue.ACTIVATE
        emitter.linear(f"{label}.up", mlp.up_proj, source, inner, kind, activation)
    elif mlp.cutoff is None:
        kind = Epilogue.GATED
        emitter.linear(f"{label}.up", mlp.gate_up_proj, source, inner, kind, activation)
    else:
        both = emitter.buffer("gate_up", 2 * width)
        emitter.linear(f"{label}.up", mlp.gate_up_proj, source, both)
        emitter.program.gate_sparsely(f"{label}.gate", both, inner, width, activation, mlp.cutoff)
    emitter.project(f"{label}.down", mlp.down_proj, inner, output)


def emit_per_layer(
    emitter: Emitter, label: str, layer: PerLayerInput, index: int, source: BufferView
) -> None:
    """Compute what the layer's own embedding of the token adds, in the emitter's ``branch``.

    Args:
        emitter: emitter of the program.
        label: label of the layer.
        layer: the module.
        index: index of the decoder layer.
        source: what gates the embedding.

    Raises:
        UnsupportedLayer: there are no operations for it.
    """
    width, branch = layer.projection.in_features, emitter.branch
    own = emitter.buffer("own", width)
    activation = _activation(label, layer.activation)
    emitter.linear(f"{label}.gate", layer.gate, source, own, Epilogue.ACTIVATE, activation)
    emitter.program.multiply(f"{label}.product", own, own, PER_LAYER.at(index * width), width)
    emitter.linear(f"{label}.projection", layer.projection, own, branch)
    emitter.norm(f"{label}.norm", layer.norm, branch, branch)


def _activation(label: str, name: str) -> int:
    if name not in ACTIVATIONS:
        raise UnsupportedLayer(f"{label}: {name}")
    return ACTIVATIONS[name]
