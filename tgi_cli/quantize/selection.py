"""Selects the linear layers of a checkpoint that are quantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from tgi_cli.errors import ConfigError, UnsupportedModelError
from tgi_cli.quantization.algorithms.recipe import Recipe, incompatibility
from tgi_cli.quantize.checkpoint_map import is_expert_stack
from tgi_cli.quantize.offloaded_model import LinearLayer, OffloadedModel

_ROUTERS = ("gate", "router", "shared_expert_gate", "wg")
"""Names of routers, which are never quantized: they are small, and errors there cost the most."""


@dataclass(frozen=True, slots=True)
class LayerSelection:
    """The layers to quantize.

    Attributes:
        blocks: selected layers of each block.
        ignored: names of all other linear layers: heads, routers, excluded ones.
        unfit: the ignored layers that the format cannot represent, with reasons.
    """

    blocks: tuple[tuple[LinearLayer, ...], ...]
    ignored: tuple[str, ...]
    unfit: dict[str, str]


def select_layers(
    model: OffloadedModel, recipe: Recipe, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> LayerSelection:
    """Select the linear layers of the decoder's blocks, except routers.

    Args:
        include: shell patterns for names of layers, of which a name must match one.
        exclude: shell patterns, of which a name must match none.

    Raises:
        ConfigError: a pattern matches nothing, or no layer is left.
        UnsupportedModelError: the model has no linear layer that can be quantized.
    """
    layers = [model.linear_layers(block) for block in range(len(model.blocks))]
    names = [layer.name for block in layers for layer in block]
    if not names:
        raise UnsupportedModelError(
            f"{model.config.architecture} has no linear layers in its blocks whose weights are "
            "tensors of their own in the checkpoint"
        )
    for flag, patterns in (("--include", include), ("--exclude", exclude)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"{flag} {pattern!r} matches no layer",
                    f"names are like {names[0]}; * matches anything",
                )
    reasons: dict[str, str] = {}

    def is_selected(layer: LinearLayer) -> bool:
        if layer.name.rpartition(".")[2] in _ROUTERS:
            return False
        if include and not any(fnmatchcase(layer.name, pattern) for pattern in include):
            return False
        if any(fnmatchcase(layer.name, pattern) for pattern in exclude):
            return False
        reason = incompatibility(recipe, *layer.shape)
        if reason is not None:
            reasons[layer.name] = reason
        return reason is None

    selected = tuple(tuple(filter(is_selected, block)) for block in layers)
    for stored, entry in model.stored.items():
        if is_expert_stack(stored, entry):
            reasons[stored] = "as no layout supports experts that share a tensor"
    quantized = {layer.stored for block in selected for layer in block}
    if not quantized:
        reason = next(iter(reasons.values()), "--include and --exclude leave none")
        raise ConfigError(f"there is no layer left to quantize: {reason}")
    embeddings = {
        name
        for path, module in model.whole.named_modules()
        if isinstance(module, nn.Embedding) and (source := model.source(f"{path}.weight"))
        for name in source.names
    }
    ignored = [
        stored.removesuffix(".weight")
        for stored, entry in model.stored.items()
        if stored.endswith(".weight")
        and len(entry.shape) == 2
        and stored not in quantized
        and stored not in embeddings
    ]
    if "lm_head.weight" not in model.stored:
        # Tied: without a tensor, but a linear layer for readers of the config.
        ignored.append("lm_head")
    return LayerSelection(selected, tuple(ignored), reasons)
