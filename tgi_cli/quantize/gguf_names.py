"""Keys and tensor names of GGUF for models of Llama's kind.

https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.gguf.reader import Value

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""llama.cpp's names by transformers' classes."""

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class GGUFLayout:
    """How a model of a configuration is written.

    Raises:
        UnsupportedModelError: when it is made: the model has something that GGUF has no key for.
    """

    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.keys()

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        (name, *_) = self.config["architectures"]
        if name not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{name} cannot be written as GGUF", f"supported: {', '.join(ARCHITECTURES)}"
            )
        return ARCHITECTURES[name]

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        config = self.config
        return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])

    def keys(self) -> dict[str, Value]:
        """The keys of the architecture."""
        config = self.config
        if config.get("sliding_window") and config.get("use_sliding_window", True):
            raise UnsupportedModelError(
                "models with a sliding window cannot be written as GGUF of this architecture"
            )
        heads = config["num_attention_heads"]
        keys: dict[str, Value] = {
            "block_count": config["num_hidden_layers"],
            "context_length": config["max_position_embeddings"],
            "embedding_length": config["hidden_size"],
            "feed_forward_length": config["intermediate_size"],
            "attention.head_count": heads,
            "attention.head_count_kv": config.get("num_key_value_heads") or heads,
            "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "rope.dimension_count": self.head_dim,
            "rope.freq_base": self._rope_base,
            "vocab_size": config["vocab_size"],
        }
        rope = self._rope
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind in ("linear", "yarn"):
            keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
            original = rope.get("original_max_position_embeddings")
            if original is not None:
                keys["rope.scaling.original_context_length"] = int(original)
        elif kind not in ("default", "llama3"):
            raise UnsupportedModelError(f"rotary positions of the kind {kind!r} have no GGUF key")
        return {f"{self.architecture}.{name}": value for name, value in keys.items()}

    @property
    def _rope(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = (
            self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        )
        return found

    @property
    def _rope_base(self) -> float:
        return float(self.config.get("rope_theta") or self._rope.get("rope_theta") or 10000.0)

    def name(self, stored: str) -> str | None:
        """GGUF's name of a tensor; None if the file does not have it.

        Raises:
            UnsupportedModelError: the tensor is not known.
        """
        module, _, suffix = stored.rpartition(".")
        if stored.endswith("rotary_emb.inv_freq"):
            return None
        if module == "lm_head" and self.config.get("tie_word_embeddings"):
            return None
        match = _LAYER.fullmatch(module)
        known = _BLOCK.get(match[2]) if match else _TOP.get(module)
        if known is None or suffix not in ("weight", "bias"):
            raise UnsupportedModelError(f"the tensor {stored} has no name in GGUF")
        return f"blk.{match[1]}.{known}.{suffix}" if match else f"{known}.{suffix}"

    def rows(self, stored: str, num_rows: int) -> Tensor | None:
        """The order in which outputs are written; None if it is their own.

        In Llama's files, the two numbers that are rotated together are neighbours.
        """
        if self.architecture != "llama" or not re.search(r"\.[qk]_proj\.", stored):
            return None
        rows = torch.arange(num_rows).view(-1, 2, self.head_dim // 2)
        return rows.transpose(1, 2).flatten()

    def rope_divisors(self) -> Tensor | None:
        """Llama 3's divisors of the rotary frequencies, float32 [head_dim / 2]; None without.

        https://github.com/huggingface/transformers, ``_compute_llama3_parameters``
        """
        rope = self._rope
        if (rope.get("rope_type") or rope.get("type")) != "llama3":
            return None
        factor, low, high = (
            float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")
        )
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        turns = float(rope["original_max_position_embeddings"]) / (
            2 * math.pi * self._rope_base**exponents
        )
        """Full turns of each frequency within the original context."""
        share = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 / ((1 - share) / factor + share)).float()
