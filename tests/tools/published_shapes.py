"""Checkpoints with the sizes of published models and random weights, as transformers saves them.

Sizes are those of each model's ``config.json``. ``python -m tests.tools.published_shapes NAME OUT``
writes one in bfloat16.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """A published model.

    Attributes:
        config: name of transformers' configuration class.
        values: its arguments.
        experts_cut_from: the published number of experts, where ``values`` has fewer to fit into
            memory.
        model: name of transformers' class that makes the model.
    """

    config: str
    values: Mapping[str, Any]
    experts_cut_from: int | None = None
    model: str = "AutoModelForCausalLM"


PUBLISHED = {
    "qwen3.5-0.8b": Shape(
        "Qwen3_5TextConfig",
        {
            "vocab_size": 248320,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2-1.2b": Shape(
        "Lfm2Config",
        {
            "vocab_size": 65536,
            "hidden_size": 2048,
            "intermediate_size": 12288,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 128000,
            "conv_L_cache": 3,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "tie_word_embeddings": True,
        },
    ),
    "granite-4-h-tiny": Shape(
        "GraniteMoeHybridConfig",
        {
            "vocab_size": 100352,
            "hidden_size": 1536,
            "intermediate_size": 512,
            "shared_intermediate_size": 1024,
            "num_hidden_layers": 40,
            "layer_types": [
                "attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)
            ],
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "num_local_experts": 64,
            "num_experts_per_tok": 6,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "mamba_d_conv": 4,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0078125,
            "logits_scaling": 6.0,
            "position_embedding_type": "nope",
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek-v2-lite": Shape(
        "DeepseekV2Config",
        {
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_routed_experts": 16,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "max_position_embeddings": 163840,
            "tie_word_embeddings": False,
        },
        experts_cut_from=64,
    ),
}
"""By name. DeepSeek-V2-Lite's 31 GB are cut to 16 of 64 experts: llama.cpp tells it from V2 by its
number of layers."""


def _smolvlm(**decoder: int) -> Shape:
    """SmolVLM: SigLIP's base model with patches of 16 pixels, and a SmolLM2."""
    text = {"model_type": "llama", "head_dim": 64, "vocab_size": 49280, **decoder}
    text |= {"max_position_embeddings": 8192, "rope_theta": 100000.0, "tie_word_embeddings": False}
    vision = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
    }
    values = {"text_config": text, "vision_config": vision, "scale_factor": 4}
    return Shape("Idefics3Config", values, model="AutoModelForImageTextToText")


PUBLISHED_VISION = {
    "smolvlm-256m": _smolvlm(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
    ),
    "smolvlm-500m": _smolvlm(
        hidden_size=960,
        intermediate_size=2560,
        num_hidden_layers=32,
        num_attention_heads=15,
        num_key_value_heads=5,
    ),
    "qwen2.5-vl-3b": Shape(
        "Qwen2_5_VLConfig",
        {
            "text_config": {
                "vocab_size": 151936,
                "hidden_size": 2048,
                "intermediate_size": 11008,
                "num_hidden_layers": 36,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "max_position_embeddings": 128000,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1000000.0,
                    "mrope_section": [16, 24, 24],
                },
                "tie_word_embeddings": True,
            },
            "vision_config": {
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "out_hidden_size": 2048,
            },
            "tie_word_embeddings": True,
        },
        model="AutoModelForImageTextToText",
    ),
}
"""Models that take images, by name."""


def write_published(name: str, path: Path, seed: int = 0) -> Path:
    """Write a checkpoint of that shape into ``path`` and return it."""
    shape = (PUBLISHED | PUBLISHED_VISION)[name]
    config = getattr(transformers, shape.config)(**shape.values, bos_token_id=1, eos_token_id=2)
    with torch.device("meta"):
        kind = getattr(transformers, shape.model)
        model = kind.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            _fill(weight_name, weight, generator)
        for buffer_name, buffer in model.named_buffers():
            if "correction_bias" in buffer_name:
                buffer.zero_()
    model.save_pretrained(path, max_shard_size="4GB")
    return path


def _fill(name: str, weight: Tensor, generator: torch.Generator) -> None:
    """Values with which activations keep their size and states neither vanish nor explode."""
    last = name.rpartition(".")[2]
    if last == "A_log":
        weight.uniform_(-0.5, 1.0, generator=generator)
    elif last == "dt_bias":
        weight.uniform_(-1.0, 0.5, generator=generator)
    elif "conv" in name:
        weight.normal_(0.0, 0.5, generator=generator)
    elif "embed" in name:
        weight.normal_(0.0, 0.1, generator=generator)
    elif weight.ndim < 2:
        weight.fill_(0.0 if last == "bias" else 1.0)
    else:
        weight.normal_(0.0, 1 / math.sqrt(weight.shape[-1]), generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(PUBLISHED | PUBLISHED_VISION))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(write_published(arguments.name, arguments.out, arguments.seed))


if __name__ == "__main__":
    main()
