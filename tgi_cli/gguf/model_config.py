"""Writes config.json, as transformers' class of the architecture has it, from a file's keys.

https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py
"""

from __future__ import annotations

from collections.abc import Callable

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.gguf import gpt_configs, hybrid_configs, transformers_configs
from tgi_cli.gguf.config_parts import (
    Config,
    expert_size,
    experts,
    granite_factors,
    layer_types,
    llama_shape,
    partial_rotary,
    shared_expert_size,
)
from tgi_cli.gguf.deepseek_configs import deepseek, deepseek32, kimi_linear
from tgi_cli.gguf.gemma_configs import gemma3n, gemma4
from tgi_cli.gguf.keys import ArchitectureKeys
from tgi_cli.gguf.reader import GGUFFile

METHOD = "gguf"
"""The ``quant_method`` in ``quantization_config``."""

_DTYPES = {"F64": "float32", "F32": "float32", "F16": "float16"}
"""The dtype for weights that are stored in this type; weights in blocks are used in bfloat16."""


def model_config(file: GGUFFile) -> Config:
    """The config.json of a file's model.

    Raises:
        UnsupportedModelError: the architecture, or an option of it, is not supported.
        ModelError: keys or tensors that a model needs are missing or contradict each other.
        OSError: the file cannot be read.
    """
    keys = ArchitectureKeys(file)
    if (other := _OTHER_FILES.get(file.get("general.type", str, ""))) is not None:
        raise UnsupportedModelError(f"{file.path} {other[0]}", other[1])
    known = ARCHITECTURES.get(file.architecture)
    if known is None:
        raise _unsupported(file)
    vocab_size = keys.shape("token_embd.weight")[0]
    config: Config = {
        "architectures": [known[0]],
        "vocab_size": vocab_size,
        "tie_word_embeddings": not keys.has_tensor("output.weight"),
        "dtype": _dtype(file),
        "pad_token_id": None,  # or transformers' default, which may be beyond the vocabulary
        "quantization_config": {"quant_method": METHOD},
    }
    for role in ("bos", "eos", "padding"):
        token = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
        if type(token) is int and 0 <= token < vocab_size:
            config[f"{role.removesuffix('ding')}_token_id"] = token
    if not keys.flag("attention.causal", True):
        raise UnsupportedModelError(
            f"{file.path} is a model whose tokens attend to later ones, which generates no text",
            "name a file with a language model's weights",
        )
    config |= known[1](keys)
    _require_rotation(keys, config)
    return config


_ROTATED_OTHERWISE = ("gemma4", "granitehybrid", "nemotron_h", "nemotron_h_moe")
"""Architectures that have another key for it, or no rotary positions."""


def _require_rotation(keys: ArchitectureKeys, config: Config) -> None:
    """Require heads to be rotated whole, unless the configuration states the share."""
    if keys.architecture in _ROTATED_OTHERWISE or "head_dim" not in config:
        return
    rotated = keys.whole("rope.dimension_count", config["head_dim"])
    if "partial_rotary_factor" not in config and rotated != config["head_dim"]:
        raise UnsupportedModelError(
            f"{keys.file.path}: {keys.architecture} with {rotated} rotated numbers of heads of "
            f"{config['head_dim']} is not supported",
            "serve the model's safetensors",
        )


_OTHER_FILES = {
    "adapter": (
        "is a LoRA adapter",
        "serve its base model, with --lora-adapters for the adapter's safetensors",
    ),
    "imatrix": ("has statistics for quantizing a model", "name the file with the model"),
    "mmproj": (
        "is the part of a model that encodes images",
        "name the file with the language model",
    ),
}
"""By ``general.type``: what a file is that is no model, and what to do."""


def _unsupported(file: GGUFFile) -> UnsupportedModelError:
    name = file.architecture
    if not name:
        return UnsupportedModelError(
            f"{file.path} does not say which architecture it has",
            "name a file with a language model's weights",
        )
    if name == "clip":
        what, remedy = _OTHER_FILES["mmproj"]
        return UnsupportedModelError(f"{file.path} {what}", remedy)
    return UnsupportedModelError(
        f"{file.path} has the architecture {name[:60]!r}, which is not supported as GGUF",
        f"supported: {', '.join(sorted(ARCHITECTURES))}; or serve the model's safetensors",
    )


def _dtype(file: GGUFFile) -> str:
    """The dtype that most weights are used in."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            dtype = _DTYPES.get(tensor.type.name, "bfloat16")
            sizes[dtype] = sizes.get(dtype, 0) + tensor.elements
    return max(sizes, key=lambda dtype: sizes[dtype], default="bfloat16")


def _llama(keys: ArchitectureKeys) -> Config:
    """Llama, Mistral and others with the same layers; Mixtral if there are experts."""
    config = llama_shape(keys)
    if experts(keys):
        return config | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": experts(keys),
            "num_experts_per_tok": keys.whole("expert_used_count"),
        }
    return config | {
        "model_type": "llama",
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": keys.has_tensor("blk.0.ffn_down.bias"),
        **partial_rotary(keys),
    }


def _qwen2(keys: ArchitectureKeys) -> Config:
    return llama_shape(keys) | {"model_type": "qwen2"}


def _qwen3(keys: ArchitectureKeys) -> Config:
    return llama_shape(keys) | {
        "model_type": "qwen3",
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
    }


def _qwen2_moe(keys: ArchitectureKeys) -> Config:
    return _qwen_moe(keys) | {
        "model_type": "qwen2_moe",
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": shared_expert_size(keys),
    }


def _qwen3_moe(keys: ArchitectureKeys) -> Config:
    return _qwen_moe(keys) | {
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
    }


def _qwen_moe(keys: ArchitectureKeys) -> Config:
    return llama_shape(keys) | {
        "num_experts": experts(keys),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "moe_intermediate_size": expert_size(keys),
        "decoder_sparse_step": 1,
    }


def _gemma(keys: ArchitectureKeys) -> Config:
    return llama_shape(keys) | {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}


_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Numbers of layers of the 27B models, whose queries are scaled by the hidden size over the number
of heads instead of the head size; no key states it."""


def _later_gemma(keys: ArchitectureKeys) -> Config:
    config = llama_shape(keys)
    scalar = keys.head_dim
    if keys.num_layers == _LARGEST_GEMMA[keys.architecture]:
        scalar = keys.whole("embedding_length") // keys.num_heads
    return config | {
        "query_pre_attn_scalar": scalar,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": keys.real("final_logit_softcapping", 0.0) or None,
    }


def _gemma2(keys: ArchitectureKeys) -> Config:
    return _later_gemma(keys) | {
        "model_type": "gemma2",
        "layer_types": layer_types(keys, 2),
        "attn_logit_softcapping": keys.real("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": keys.real("final_logit_softcapping", 30.0) or None,
        "sliding_window": keys.whole("attention.sliding_window", 4096),
    }


def _gemma3(keys: ArchitectureKeys) -> Config:
    window = keys.whole("attention.sliding_window", 0, 0)
    return _later_gemma(keys) | {
        "model_type": "gemma3_text",
        "sliding_window": window or None,
        "layer_types": layer_types(keys, 6 if window else 1),
        "rope_local_base_freq": keys.real("rope.freq_base_swa", 10000.0),
    }


def _phi3(keys: ArchitectureKeys) -> Config:
    config = llama_shape(keys)
    return config | {
        "model_type": "phi3",
        "sliding_window": keys.whole("attention.sliding_window", 0, 0) or None,
        "original_max_position_embeddings": keys.whole(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
        **partial_rotary(keys),
    }


def _granite(keys: ArchitectureKeys) -> Config:
    if not keys.flag("rope.scaling.finetuned", True):
        raise UnsupportedModelError(
            f"{keys.file.path}: {keys.architecture} without rotary positions is not supported",
            "serve the model's safetensors",
        )
    return (
        llama_shape(keys)
        | granite_factors(keys)
        | {
            "model_type": "granite",
            "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
            "mlp_bias": keys.has_tensor("blk.0.ffn_down.bias"),
        }
    )


def _llama4(keys: ArchitectureKeys) -> Config:
    """Fields that files do not state are those that llama.cpp assumes for all of them."""
    full = keys.has("attention.sliding_window") and not keys.whole("attention.sliding_window", 0, 0)
    layers = keys.num_layers
    return llama_shape(keys) | {
        "model_type": "llama4_text",
        "intermediate_size": expert_size(keys),
        "intermediate_size_mlp": keys.whole("feed_forward_length"),
        "num_local_experts": experts(keys),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "interleave_moe_layer_step": keys.whole("interleave_moe_layer_step", 1),
        "use_qk_norm": experts(keys) != _EXPERTS_WITHOUT_NORMS,
        "attention_chunk_size": None if full else 8192,
        "no_rope_layers": [int(full or (layer + 1) % 4 != 0) for layer in range(layers)],
        "attn_temperature_tuning": not full,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }


_EXPERTS_WITHOUT_NORMS = 128
"""The number of experts of Llama 4 Maverick, whose queries and keys have no norm."""


def _olmo(keys: ArchitectureKeys) -> Config:
    """OLMo 2; OLMo 3 if there are windows."""
    config = llama_shape(keys)
    window = keys.whole("attention.sliding_window", 0, 0)
    if not window:
        return config | {"model_type": "olmo2"}
    return config | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": layer_types(keys, 4),
    }


def _smollm3(keys: ArchitectureKeys) -> Config:
    return llama_shape(keys) | {
        "model_type": "smollm3",
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "no_rope_layer_interval": 4,
    }


def _seed_oss(keys: ArchitectureKeys) -> Config:
    return llama_shape(keys) | {
        "model_type": "seed_oss",
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "attention_out_bias": keys.has_tensor("blk.0.attn_output.bias"),
    }


def _gpt_oss(keys: ArchitectureKeys) -> Config:
    config = llama_shape(keys)
    if "rope_scaling" in config:
        config["rope_scaling"]["truncate"] = False
    return config | {
        "model_type": "gpt_oss",
        "intermediate_size": expert_size(keys),
        "num_local_experts": experts(keys),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "sliding_window": keys.whole("attention.sliding_window", 128),
        "layer_types": layer_types(keys, 2),
        "attention_bias": True,
    }


ARCHITECTURES: dict[str, tuple[str, Callable[[ArchitectureKeys], Config]]] = {
    "arcee": ("ArceeForCausalLM", transformers_configs.arcee),
    "chatglm": ("GlmForCausalLM", transformers_configs.glm),
    "cohere2": ("Cohere2ForCausalLM", transformers_configs.cohere2),
    "command-r": ("CohereForCausalLM", transformers_configs.cohere),
    "deepseek2": ("DeepseekV2ForCausalLM", deepseek),
    "deepseek32": ("DeepseekV32ForCausalLM", deepseek32),
    "dots1": ("Dots1ForCausalLM", transformers_configs.dots1),
    "ernie4_5": ("Ernie4_5ForCausalLM", transformers_configs.ernie),
    "ernie4_5-moe": ("Ernie4_5_MoeForCausalLM", transformers_configs.ernie_moe),
    "exaone4": ("Exaone4ForCausalLM", transformers_configs.exaone4),
    "falcon": ("FalconForCausalLM", gpt_configs.falcon),
    "gemma": ("GemmaForCausalLM", _gemma),
    "gemma2": ("Gemma2ForCausalLM", _gemma2),
    "gemma3": ("Gemma3ForCausalLM", _gemma3),
    "gemma3n": ("Gemma3nForCausalLM", gemma3n),
    "gemma4": ("Gemma4ForCausalLM", gemma4),
    "glm4": ("Glm4ForCausalLM", transformers_configs.glm4),
    "glm4moe": ("Glm4MoeForCausalLM", transformers_configs.glm4_moe),
    "gpt-oss": ("GptOssForCausalLM", _gpt_oss),
    "gpt2": ("GPT2LMHeadModel", gpt_configs.gpt2),
    "gptneox": ("GPTNeoXForCausalLM", gpt_configs.gpt_neox),
    "granite": ("GraniteForCausalLM", _granite),
    "granitehybrid": ("GraniteMoeHybridForCausalLM", hybrid_configs.granite_hybrid),
    "granitemoe": ("GraniteMoeHybridForCausalLM", hybrid_configs.granite_moe),
    "hunyuan-dense": ("HunYuanDenseV1ForCausalLM", transformers_configs.hunyuan),
    "kimi-linear": ("KimiLinearForCausalLM", kimi_linear),
    "lfm2": ("Lfm2ForCausalLM", hybrid_configs.lfm2),
    "lfm2moe": ("Lfm2MoeForCausalLM", hybrid_configs.lfm2),
    "llama": ("LlamaForCausalLM", _llama),
    "llama4": ("Llama4ForCausalLM", _llama4),
    "minimax-m2": ("MiniMaxM2ForCausalLM", transformers_configs.minimax_m2),
    "mistral3": ("MistralForCausalLM", transformers_configs.ministral3),
    "nemotron": ("NemotronForCausalLM", transformers_configs.nemotron),
    "nemotron_h": ("NemotronHForCausalLM", hybrid_configs.nemotron),
    "nemotron_h_moe": ("NemotronHForCausalLM", hybrid_configs.nemotron),
    "olmo": ("OlmoForCausalLM", transformers_configs.olmo),
    "olmo2": ("Olmo2ForCausalLM", _olmo),
    "olmoe": ("OlmoeForCausalLM", transformers_configs.olmoe),
    "phi2": ("PhiForCausalLM", transformers_configs.phi),
    "phi3": ("Phi3ForCausalLM", _phi3),
    "qwen2": ("Qwen2ForCausalLM", _qwen2),
    "qwen2moe": ("Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen2vl": ("Qwen2ForCausalLM", _qwen2),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "qwen35": ("Qwen3_5ForCausalLM", hybrid_configs.qwen35),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", hybrid_configs.qwen35),
    "qwen3moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "qwen3next": ("Qwen3NextForCausalLM", hybrid_configs.qwen3_next),
    "qwen3vl": ("Qwen3ForCausalLM", _qwen3),
    "qwen3vlmoe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "seed_oss": ("SeedOssForCausalLM", _seed_oss),
    "smollm3": ("SmolLM3ForCausalLM", _smollm3),
    "stablelm": ("StableLmForCausalLM", transformers_configs.stablelm),
    "starcoder": ("GPTBigCodeForCausalLM", gpt_configs.gpt2),
    "starcoder2": ("Starcoder2ForCausalLM", gpt_configs.starcoder2),
}
"""Architectures by llama.cpp's names: transformers' class, and the function that reads the keys.

Vision-language models are read as their decoder: without images, a token has the same position
on all axes.
"""
