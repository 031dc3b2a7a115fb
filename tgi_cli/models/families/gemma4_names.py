"""What the checkpoints of Gemma 4 call things."""

from __future__ import annotations

from functools import partial
from typing import Any

from tgi_cli.models import gemma_fields
from tgi_cli.models.families.gemma import SANDWICH
from tgi_cli.models.weight_map import Source, StackedExperts, decoder_names, gated_parts

_MODULES = {
    **SANDWICH,
    **gemma_fields.PER_LAYER,
    **gated_parts("mlp.dense", "mlp"),
    "scalar": "layer_scalar",
    "mlp.dense_norm": "pre_feedforward_layernorm",
    "mlp.dense_output_norm": "post_feedforward_layernorm_1",
    "mlp.moe_norm": "pre_feedforward_layernorm_2",
    "mlp.moe_output_norm": "post_feedforward_layernorm_2",
    "mlp.moe.expert_scales": "router.per_expert_scale",
    "mlp.moe.router": "router.proj",
}


class Gemma4Names:
    """Names of a checkpoint whose decoder is below ``prefix``.

    Experts are ``stacked``, but in GGUF files, which are read one by one; the router's weight takes
    in the factors of its input.
    """

    def __init__(self, prefix: str, hidden_size: int, stacked: bool = True) -> None:
        self._is_stacked = stacked
        self._names = decoder_names(prefix, _MODULES, gemma_fields.TOP)
        self._stacked = StackedExperts(self._names, "experts.gate_up_proj", "experts.down_proj")
        self._factor = hidden_size**-0.5

    def __call__(self, name: str) -> Source:
        """The source of the model's tensor ``name``."""
        if self._is_stacked and ".mlp.moe.experts." in name:
            path = name.replace("model.layers", self._names.layers, 1)
            return self._stacked(path.replace(".moe.", "."))
        found = self._names(name)
        if not name.endswith(".mlp.moe.router.weight"):
            return found
        scale = found.names[0].replace("router.proj.weight", "router.scale")
        return Source((found.names[0], scale), join=partial(_scaled, self._factor))


def _scaled(factor: float, weight: Any, scale: Any) -> Any:
    return weight.float() * (scale.float() * factor)
