"""Models of the GPU benchmarks: configurations, and what a step of them reads and computes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "dtype": "bfloat16",
}

QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "dtype": "bfloat16",
}

SHAPES: dict[str, dict[str, Any]] = {
    "8b": LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
    },
    "1b": LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "30b-a3b": QWEN3_MOE
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    "tiny": LLAMA
    | {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
    },
    "tiny-moe": QWEN3_MOE
    | {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
    },
}
"""By name: Llama-3.1-8B, Llama-3.2-1B and Qwen3-30B-A3B, and miniatures to try the scripts with."""


@dataclass(frozen=True)
class Shape:
    """A model configuration, from which rooflines are computed."""

    config: dict[str, Any]

    @property
    def kv_bytes(self) -> int:
        """KV cache bytes of one token, at two bytes per element."""
        c = self.config
        return 4 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"]

    def _attention_weights(self) -> int:
        c = self.config
        heads = 2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"]
        return c["hidden_size"] * c["head_dim"] * heads

    def _mlp_weights(self, experts: float | None = None) -> float:
        """Of a layer; with experts of so many of them."""
        c = self.config
        if "num_experts" not in c:
            return 3 * c["hidden_size"] * c["intermediate_size"]
        count = c["num_experts_per_tok"] if experts is None else experts
        router = c["hidden_size"] * c["num_experts"]
        return 3 * c["hidden_size"] * c["moe_intermediate_size"] * count + router

    def _experts_read(self, batch: int) -> float | None:
        """How many experts ``batch`` tokens choose on average, if they choose at random."""
        c = self.config
        if "num_experts" not in c:
            return None
        share = c["num_experts_per_tok"] / c["num_experts"]
        return c["num_experts"] * (1 - (1 - share) ** batch)

    def weight_bytes(self, batch: int = 1, bits: float = 16.0) -> float:
        """Bytes of weights that a decode step reads: all but the embedding and idle experts.

        Args:
            batch: sequences.
            bits: of a weight in the layers; the head has 16.
        """
        c = self.config
        layer = self._attention_weights() + self._mlp_weights(self._experts_read(batch))
        head = c["vocab_size"] * c["hidden_size"]
        return layer * c["num_hidden_layers"] * bits / 8 + 2 * head

    def decode_bytes(self, batch: int, context: int, bits: float = 16.0) -> float:
        """Bytes that a decode step has to read."""
        return self.weight_bytes(batch, bits) + batch * context * self.kv_bytes

    def prefill_flops(self, tokens: int) -> float:
        """Operations of a prompt: matrix products of the layers, and causal attention."""
        c = self.config
        head = c["vocab_size"] * c["hidden_size"]
        layers = (self._attention_weights() + self._mlp_weights()) * c["num_hidden_layers"]
        width = c["num_attention_heads"] * c["head_dim"]
        attention = 4 * c["num_hidden_layers"] * width * tokens * tokens / 2
        return 2 * layers * tokens + 2 * head + attention


def write_shape(name: str, folder: Path, **changes: Any) -> Shape:
    """Write the config.json of a shape into ``folder``."""
    config = {**SHAPES[name], **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return Shape(config)
