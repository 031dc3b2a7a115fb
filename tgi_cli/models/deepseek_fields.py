"""Readers of config.json for DeepSeek's latent attention and experts in groups. No torch."""

from __future__ import annotations

import math

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.spec import IndexerSpec, LatentSpec, MoESpec, RopeSpec
from tgi_cli.models.weight_map import ModuleSource, paired_halves


def latent_attention(config: ModelConfig) -> LatentSpec:
    """The attention in config.json; its rotary angles are those of :func:`latent_rope`."""
    bias = config.get("attention_bias", bool, False)
    nope, rope = config.positive("qk_nope_head_dim"), config.positive("qk_rope_head_dim")
    rank = config.raw.get("q_lora_rank")
    return LatentSpec(
        num_heads=config.positive("num_attention_heads"),
        kv_lora_rank=config.positive("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=config.positive("v_head_dim"),
        q_lora_rank=None if rank is None else config.positive("q_lora_rank"),
        bias=bias,
        output_bias=bias,
        scale=(nope + rope) ** -0.5 * _yarn_scale(config) ** 2,
        indexer=_indexer(config),
    )


def _indexer(config: ModelConfig) -> IndexerSpec | None:
    """The indexer, which chooses the tokens that layers attend to (V3.2)."""
    if config.raw.get("index_topk") is None:
        return None
    if config.raw.get("q_lora_rank") is None:
        raise config.invalid("'index_topk' needs a 'q_lora_rank'")
    dims, rotated = config.positive("index_head_dim"), config.positive("qk_rope_head_dim")
    if dims < rotated:
        raise config.invalid(f"{rotated} of {dims} dimensions of index keys cannot be rotated")
    return IndexerSpec(
        num_heads=config.positive("index_n_heads"),
        head_dim=dims,
        top_k=config.positive("index_topk"),
    )


def latent_rope(config: ModelConfig, context: int) -> RopeSpec:
    """The rotary angles of all layers."""
    parameters = config_fields.rope_parameters(config)
    # Some files state it as a share of a head, some as one of the rotated dimensions.
    parameters.pop("partial_rotary_factor", None)
    dims = config.positive("qk_rope_head_dim")
    return config_fields.rope_spec(config, dims, context, parameters)


def latent_modules(spec: LatentSpec, interleaved: bool) -> dict[str, ModuleSource]:
    """The checkpoint's modules of what is rotated, whose pairs may be neighbours there."""
    if not interleaved:
        return {}
    head_dim = spec.qk_nope_head_dim + spec.qk_rope_head_dim
    heads = paired_halves(spec.qk_nope_head_dim, head_dim, head_dim)
    row = paired_halves(spec.kv_lora_rank, spec.row, spec.row)
    return {
        "self_attn.q_proj": ModuleSource("self_attn.q_proj", heads),
        "self_attn.q_b_proj": ModuleSource("self_attn.q_b_proj", heads),
        "self_attn.kv_a_proj_with_mqa": ModuleSource("self_attn.kv_a_proj_with_mqa", row),
    }


def sparse_layers(config: ModelConfig, num_layers: int) -> list[bool]:
    """Which layers have experts."""
    if config.raw.get("n_routed_experts") is None:
        return [False] * num_layers
    kinds = config.get("mlp_layer_types", list, [])
    if kinds and len(kinds) != num_layers:
        raise config.invalid(f"'mlp_layer_types' names {len(kinds)} of {num_layers} layers")
    for kind in kinds:
        if kind not in ("dense", "sparse"):
            raise UnsupportedModelError(
                f"layer type {kind!r} is not supported for {config.architecture}",
                "supported: dense, sparse",
            )
    if kinds:
        return [kind == "sparse" for kind in kinds]
    first, step = config.get("first_k_dense_replace", int), config.positive("moe_layer_freq", 1)
    return [layer >= first and layer % step == 0 for layer in range(num_layers)]


def grouped_experts(config: ModelConfig, softmax: bool) -> MoESpec:
    """Experts that are chosen by ``softmax``, as DeepSeek V2 does, or by sigmoids, as V3.

    Raises:
        UnsupportedModelError: they are chosen in another way.
        ModelError: sizes contradict each other.
    """
    method = config.get("topk_method", str)
    for key, known in (
        ("topk_method", ("greedy", "group_limited_greedy") if softmax else ("noaux_tc",)),
        ("scoring_func", ("softmax",) if softmax else ("sigmoid",)),
        ("norm_topk_prob", (False,) if softmax else (False, True)),
    ):
        if config.raw.get(key) not in (None, *known):
            raise UnsupportedModelError(
                f"{key} {config.raw[key]!r} is not supported for {config.architecture}"
            )
    num_experts, size = (
        config.positive("n_routed_experts"),
        config.positive("moe_intermediate_size"),
    )
    groups, top_groups = config.positive("n_group", 1), config.positive("topk_group", 1)
    if method == "greedy":
        groups = top_groups = 1
    if num_experts % groups or top_groups > groups:
        raise config.invalid(f"{num_experts} experts in {groups} groups, of which {top_groups}")
    shared = config.get("n_shared_experts", int, 0)
    if shared < 0:
        raise config.invalid(f"'n_shared_experts' is {shared}")
    return MoESpec(
        num_experts=num_experts,
        top_k=config.positive("num_experts_per_tok"),
        intermediate_size=size,
        activation=config_fields.activation(config),
        router="softmax_topk" if softmax else "sigmoid_topk",
        normalize=config.get("norm_topk_prob", bool),
        num_groups=groups,
        top_groups=top_groups,
        best_of_group=1 if softmax else 2,
        scaling=config.get("routed_scaling_factor", float),
        router_correction=not softmax,
        router_float32=True,
        shared_intermediate_size=size * shared or None,
    )


def _yarn_scale(config: ModelConfig) -> float:
    """YaRN's magnitude of scores (https://arxiv.org/abs/2309.00071, section 3.4), of a query's or
    a key's part: it is no part of the angles where ``mscale_all_dim`` is stated."""
    parameters = config_fields.rope_parameters(config)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    factor, weight = parameters.get("factor") or 1.0, parameters.get("mscale_all_dim") or 0.0
    if kind == "default" or float(factor) <= 1:
        return 1.0
    return 0.1 * float(weight) * math.log(float(factor)) + 1.0
