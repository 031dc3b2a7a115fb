"""What the checkpoints of Gemma 4 call things; of Gemma 3n, whose layers share caches, too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.families.gemma import SANDWICH
from tgi_cli.models.spec import AttentionSpec, LayerSpec, NormSpec, PerLayerSpec
from tgi_cli.models.weight_map import Names, Source, StackedExperts

FULL, SLIDING = "full_attention", "sliding_attention"

DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
}
ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
PER_LAYER = {
    "per_layer.gate": "per_layer_input_gate",
    "per_layer.projection": "per_layer_projection",
    "per_layer.norm": "post_per_layer_input_norm",
}
TOP = {
    "embed_tokens": "embed_tokens",
    "norm": "norm",
    "per_layer.table": "embed_tokens_per_layer",
    "per_layer.projection": "per_layer_model_projection",
    "per_layer.norm": "per_layer_projection_norm",
}
_MODULES = {
    **SANDWICH,
    **PER_LAYER,
    "scalar": "layer_scalar",
    "mlp.dense_norm": "pre_feedforward_layernorm",
    "mlp.dense.gate_proj": "mlp.gate_proj",
    "mlp.dense.up_proj": "mlp.up_proj",
    "mlp.dense.down_proj": "mlp.down_proj",
    "mlp.dense_output_norm": "post_feedforward_layernorm_1",
    "mlp.moe_norm": "pre_feedforward_layernorm_2",
    "mlp.moe_output_norm": "post_feedforward_layernorm_2",
    "mlp.moe.expert_scales": "router.per_expert_scale",
    "mlp.moe.router": "router.proj",
}


def layer(config: ModelConfig, norm: NormSpec) -> LayerSpec:
    """A layer without mixer and MLP: norms around both, and embeddings of its own, if any."""
    per_layer = None
    if width := config.get("hidden_size_per_layer_input", int, 0):
        per_layer = PerLayerSpec(
            vocab_size=config.positive("vocab_size_per_layer_input"),
            width=width,
            eps=norm.eps,
            activation=activation(config),
        )
    return LayerSpec(
        mixer=None,
        mlp=None,
        input_norm=norm,
        mixer_output_norm=norm,
        mlp_norm=norm,
        mlp_output_norm=norm,
        per_layer=per_layer,
    )


def activation(config: ModelConfig) -> str:
    """Of MLPs and of the gates of embeddings."""
    return config_fields.activation(config, "hidden_activation", "gelu_pytorch_tanh")


def names(decoder: str, modules: dict[str, str], top: dict[str, str]) -> Names:
    """Those of a checkpoint whose decoder is called ``decoder``."""
    return Names(
        layers=f"{decoder}.layers",
        modules=modules,
        top={f"model.{ours}": f"{decoder}.{theirs}" for ours, theirs in top.items()},
    )


ALONE = names("model", _MODULES, TOP)
SEEING = names("model.language_model", _MODULES, TOP)


def source(names: Names, hidden_size: int, name: str) -> Source:
    """Experts are stacked; the router's weight has the factors of its input in it."""
    if ".mlp.moe.experts." in name:
        stacked = StackedExperts(names, "experts.gate_up_proj", "experts.down_proj")
        return stacked(name.replace("model.layers", names.layers, 1).replace(".moe.", "."))
    found = names(name)
    if name.endswith(".mlp.moe.router.weight"):
        scale = found.names[0].replace("router.proj.weight", "router.scale")
        join = partial(_scaled, hidden_size**-0.5)
        return Source((found.names[0], scale), join=join)
    return found


def _scaled(factor: float, weight: Any, scale: Any) -> Any:
    return weight.float() * (scale.float() * factor)


def shared_cache(config: ModelConfig, kinds: list[str], layer: int) -> int | None:
    """The layer whose cache ``layer`` reads: the last of its kind that has one, or None.

    Raises:
        ModelError: none of its kind has one.
    """
    first = len(kinds) - config.get("num_kv_shared_layers", int, 0)
    if layer < first:
        return None
    owners = [owner for owner in range(max(first, 0)) if kinds[owner] == kinds[layer]]
    if not owners:
        raise config.invalid(f"'num_kv_shared_layers' leaves no layer of {kinds[layer]} before it")
    return owners[-1]


def ignored(attentions: Sequence[AttentionSpec]) -> tuple[str, ...]:
    """Patterns of what sees and hears, and of keys and values of layers that read others'."""
    shared = "|".join(str(n) for n, each in enumerate(attentions) if each.cache is not None)
    return (
        r"(model\.)?(vision|audio)_(tower|embedder)\..*",
        r"(model\.)?embed_(vision|audio)\..*",
        rf".*\.layers\.({shared})\.self_attn\.[kv]_(proj|norm)\..*",
    )
