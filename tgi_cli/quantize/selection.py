"""Which linear layers of a checkpoint are quantized, and which stay as they are."""

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
"""Last parts of names of layers that choose experts: small, and an error there costs the most."""


@dataclass(frozen=True, slots=True)
class LayerSelection:
    """What is to be quantized.

    Attributes:
        blocks: slots of each block.
        ignored: linear layers that stay as they are, by name: heads, routers, what was excluded.
        unfit: of these, those that the format cannot keep, with the reason.
    """

    blocks: tuple[tuple[LinearLayer, ...], ...]
    ignored: tuple[str, ...]
    unfit: dict[str, str]


def select_layers(
    model: OffloadedModel, recipe: Recipe, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> LayerSelection:
    """Choose the linear layers of the decoder's blocks, but no routers.

    ``include`` and ``exclude`` are shell patterns over the checkpoint's names of layers; of the
    first, where there are any, a name must match one, of the second none.

    Raises:
        ConfigError: a pattern that matches nothing, or nothing is left.
        UnsupportedModelError: the model has no linear layer that could be quantized.
    """
    slots = [model.slots(block) for block in range(len(model.blocks))]
    names = [slot.name for block in slots for slot in block]
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
                    f"names are like {names[0]}; * stands for anything",
                )
    reasons: dict[str, str] = {}

    def wanted(slot: LinearLayer) -> bool:
        if slot.name.rpartition(".")[2] in _ROUTERS:
            return False
        if include and not any(fnmatchcase(slot.name, pattern) for pattern in include):
            return False
        if any(fnmatchcase(slot.name, pattern) for pattern in exclude):
            return False
        reason = incompatibility(recipe, *slot.shape)
        if reason is not None:
            reasons[slot.name] = reason
        return reason is None

    chosen = tuple(tuple(slot for slot in block if wanted(slot)) for block in slots)
    for stored, entry in model.stored.items():
        if is_expert_stack(stored, entry):
            reasons[stored] = "as there is no layout for experts that share a tensor"
    quantized = {slot.stored for block in chosen for slot in block}
    if not quantized:
        reason = next(iter(reasons.values()), "--include and --exclude leave none")
        raise ConfigError(f"there is no layer left to quantize: {reason}")
    tables = {
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
        and stored not in tables
    ]
    if "lm_head.weight" not in model.stored:
        ignored.append("lm_head")  # tied: no tensor, but a linear layer to those who read this
    return LayerSelection(chosen, tuple(ignored), reasons)
