"""DeepSeek V2 (https://arxiv.org/abs/2405.04434) and V3 (https://arxiv.org/abs/2412.19437).

Attention is latent; experts are chosen from the best groups, beside shared ones. Kimi K2 and
GLM-4.7-Flash are V3 in other sizes, Youtu-LLM is V3 without experts. V3.2
(https://arxiv.org/abs/2512.02556) is V3 with an indexer in each layer.
"""

from __future__ import annotations

from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.deepseek_fields import (
    grouped_experts,
    latent_attention,
    latent_modules,
    latent_rope,
    sparse_layers,
)
from tgi_cli.models.spec import DecoderSpec, LayerSpec, NormSpec
from tgi_cli.models.weight_map import Names, StackedExperts, gated_parts, has_stacked_experts

_V3: dict[str, Any] = {
    "n_shared_experts": 1, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8,
    "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "n_routed_experts": 256, "moe_intermediate_size": 2048, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_interleave": True, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "tie_word_embeddings": False,
}  # fmt: skip
_V32 = _V3 | {
    "max_position_embeddings": 163840, "index_topk": 2048, "index_head_dim": 128,
    "index_n_heads": 64,
}  # fmt: skip
_V2 = _V3 | {
    "n_shared_experts": 2, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0,
    "norm_topk_prob": False, "n_routed_experts": 64, "moe_intermediate_size": 1407,
    "max_position_embeddings": 2048, "scoring_func": "softmax", "topk_method": "greedy",
    "n_group": None, "topk_group": None, "num_experts_per_tok": None,
}  # fmt: skip
_GLM_LITE = _V3 | {
    "routed_scaling_factor": 1.8, "q_lora_rank": 768, "v_head_dim": 256, "qk_nope_head_dim": 192,
    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 1,
    "n_routed_experts": 64, "moe_intermediate_size": 1536, "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
_YOUTU = _V3 | {
    "n_routed_experts": None, "max_position_embeddings": 131072, "tie_word_embeddings": True
}  # fmt: skip
_DEFAULTS = {
    "DeepseekV2ForCausalLM": _V2,
    "DeepseekV3ForCausalLM": _V3,
    "DeepseekV32ForCausalLM": _V32,
    "Glm4MoeLiteForCausalLM": _GLM_LITE,
    "YoutuForCausalLM": _YOUTU,
}
"""The meaning of absent keys."""


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/deepseek_v3 and .../deepseek_v2"""
    config = config_fields.filled(config, _DEFAULTS[config.architecture])
    context = config.positive("max_position_embeddings")
    norm = NormSpec(config.get("rms_norm_eps", float))
    mixer = latent_attention(config)
    dense = config_fields.gated_mlp(config)
    interleaved = config.get("rope_interleave", bool)
    names = Names(modules={**_MODULES, **latent_modules(mixer, interleaved)})
    layers = config.positive("num_hidden_layers")
    extra = config.positive("num_nextn_predict_layers", 1)
    sparse = sparse_layers(config, layers)
    experts = (
        grouped_experts(config, softmax=config.architecture == "DeepseekV2ForCausalLM")
        if any(sparse)
        else dense
    )
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=tuple(
            LayerSpec(mixer=mixer, mlp=experts if chosen else dense, input_norm=norm, mlp_norm=norm)
            for chosen in sparse
        ),
        final_norm=norm,
        ropes=(latent_rope(config, context),),
        tie_word_embeddings=config.get("tie_word_embeddings", bool),
        source=StackedExperts(names) if has_stacked_experts(config.path) else names,
        # Layers that predict a further token, for speculation; indexers where texts are short.
        ignored=(
            *(rf"model\.layers\.{layers + layer}\..*" for layer in range(extra)),
            *((r"model\.layers\.\d+\.self_attn\.indexer\..*",) if mixer.indexer else ()),
        ),
    )


_MODULES = {
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.router": "mlp.gate",
    "mlp.router.correction": "mlp.gate.e_score_correction_bias",
    **gated_parts("mlp.shared_expert", "mlp.shared_experts"),
}
