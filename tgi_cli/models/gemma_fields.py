"""What Gemma 3n and 4 have in common: embeddings per layer, shared caches, names. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig, TextModelPart
from tgi_cli.models.spec import AttentionSpec, DecoderSpec, LayerSpec, NormSpec, PerLayerSpec

FULL, SLIDING = "full_attention", "sliding_attention"
PER_LAYER = {
    "per_layer.gate": "per_layer_input_gate",
    "per_layer.projection": "per_layer_projection",
    "per_layer.norm": "post_per_layer_input_norm",
}
"""A layer's modules that add its own embedding."""
TOP = {
    "embed_tokens": "embed_tokens",
    "norm": "norm",
    "per_layer.table": "embed_tokens_per_layer",
    "per_layer.projection": "per_layer_model_projection",
    "per_layer.norm": "per_layer_projection_norm",
}
"""Modules outside of the layers."""


def layer_kinds(config: ModelConfig, full_every: int) -> list[str]:
    """The type of each layer; by default, every ``full_every``-th one has no window."""
    indices = range(config.positive("num_hidden_layers"))
    default = [SLIDING if (layer + 1) % full_every else FULL for layer in indices]
    return config_fields.layer_kinds(config, default)


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
    """The activation of MLPs and of the gates of embeddings."""
    return config_fields.activation(config, "hidden_activation", "gelu_pytorch_tanh")


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


def decoder(part: TextModelPart, layers: Sequence[LayerSpec], **options: Any) -> DecoderSpec:
    """The decoder with these layers; ``options`` are its names and ropes."""
    config, hidden_size = part.config, part.config.positive("hidden_size")
    mixers = (layer.mixer for layer in layers)
    caches = (mixer.cache if isinstance(mixer, AttentionSpec) else None for mixer in mixers)
    shared = "|".join(str(n) for n, cache in enumerate(caches) if cache is not None)
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=config.positive("max_position_embeddings"),
        layers=tuple(layers),
        final_norm=NormSpec(config.get("rms_norm_eps", float)),
        tie_word_embeddings=config.get("tie_word_embeddings", bool),
        embedding_scale=hidden_size**0.5,
        logit_softcap=config_fields.factor(config, "final_logit_softcapping"),
        # The towers of images and sound, and keys and values of layers that read others'.
        ignored=(
            r"(model\.)?(vision|audio)_(tower|embedder)\..*",
            r"(model\.)?embed_(vision|audio)\..*",
            rf".*\.layers\.({shared})\.self_attn\.[kv]_(proj|norm)\..*",
        ),
        notice=part.notice,
        **options,
    )
