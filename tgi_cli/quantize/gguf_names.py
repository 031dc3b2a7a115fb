"""Keys and tensor names of GGUF for models that are written.

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

from tgi_cli.errors import ModelError, UnsupportedModelError
from tgi_cli.gguf.values import Value
from tgi_cli.layers.rotary import yarn_magnitude
from tgi_cli.quantize.gguf_forms import FORMS, GGUFForm, head_dim

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class GGUFLayout:
    """How a model of a configuration is written.

    Raises:
        UnsupportedModelError: when it is made: the model has something that GGUF has no key for.
        ModelError: likewise: config.json leaves out what files have to state.
    """

    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        try:
            self.keys()
        except KeyError as error:
            raise ModelError(
                f"config.json has no {error}, which a GGUF file has to state", "add it"
            ) from error

    @property
    def form(self) -> GGUFForm:
        """What the architecture differs in."""
        (name, *_) = self.config["architectures"]
        if name not in FORMS:
            raise UnsupportedModelError(
                f"{name} cannot be written as GGUF", f"supported: {', '.join(FORMS)}"
            )
        return FORMS[name]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return self.form.architecture

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return head_dim(self.config)

    def keys(self) -> dict[str, Value]:
        """The keys of the architecture."""
        config, form = self.config, self.form
        windows = config.get("sliding_window") and config.get("use_sliding_window", True)
        if windows and not form.has_windows:
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
            "rope.dimension_count": int(self.head_dim * self._rotated_share),
            "rope.freq_base": self._rope_base,
            "vocab_size": config["vocab_size"],
        }
        keys |= self._rope_keys() | form.keys(config)
        return {f"{self.architecture}.{name}": value for name, value in keys.items()}

    @property
    def _rope(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = (
            self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        )
        full: Mapping[str, Any] = found.get("full_attention", found)
        return full

    @property
    def _rope_kind(self) -> str:
        """How angles are scaled. Phi-3's checkpoints have called longrope "su", and "yarn"."""
        kind = str(self._rope.get("rope_type") or self._rope.get("type") or "default")
        return "longrope" if self.architecture == "phi3" and kind in ("su", "yarn") else kind

    def _rope_keys(self) -> dict[str, Value]:
        """The keys of what :attr:`_rope_kind` names."""
        rope, kind = self._rope, self._rope_kind
        original = rope.get("original_max_position_embeddings")
        if kind == "longrope" and self.architecture == "phi3":
            original = self.config.get("original_max_position_embeddings") or original or 4096
            scale = rope.get("factor") or self.config["max_position_embeddings"] / original
            own = 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(original))
            stated = rope.get("attention_factor")
            return {
                "rope.scaling.attn_factor": own if stated is None else float(stated),
                "rope.scaling.original_context_length": int(original),
            }
        if kind in ("default", "llama3"):
            return {}
        if kind not in ("linear", "yarn"):
            raise UnsupportedModelError(f"rotary positions of the kind {kind!r} have no GGUF key")
        keys: dict[str, Value] = {
            "rope.scaling.type": kind,
            "rope.scaling.factor": float(rope["factor"]),
        }
        if original is not None:
            keys["rope.scaling.original_context_length"] = int(original)
        return keys | self._yarn_keys() if kind == "yarn" else keys

    def _yarn_keys(self) -> dict[str, Value]:
        """Keys of YaRN's options. Readers multiply ``attn_factor`` by YaRN's own magnitude."""
        rope = self._rope
        if not rope.get("truncate", True):
            raise UnsupportedModelError("YaRN with truncate off has no GGUF key")
        keys: dict[str, Value] = {
            f"rope.scaling.yarn_{name}": float(rope[name])
            for name in ("beta_fast", "beta_slow")
            if rope.get(name)
        }
        own = yarn_magnitude(float(rope["factor"]), {})
        magnitude = yarn_magnitude(float(rope["factor"]), rope)
        return keys if magnitude == own else keys | {"rope.scaling.attn_factor": magnitude / own}

    @property
    def _rotated_share(self) -> float:
        """Share of a head's numbers that is rotated."""
        stated = self._rope.get("partial_rotary_factor", self.config.get("partial_rotary_factor"))
        return 1.0 if stated is None else float(stated)

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
        path = _EXPERT.sub(".experts.*.", match[2]) if match else ""
        known = self.form.block.get(path) if match else _TOP.get(module)
        if known is None or suffix not in ("weight", "bias"):
            raise UnsupportedModelError(f"the tensor {stored} has no name in GGUF")
        return f"blk.{match[1]}.{known}.{suffix}" if match else f"{known}.{suffix}"

    def expert(self, stored: str) -> int | None:
        """The expert that a tensor belongs to, all of which are one in the file; None for none."""
        found = _EXPERT.search(stored)
        return None if found is None else int(found[1])

    def rows(self, stored: str, num_rows: int) -> Tensor | None:
        """The order in which outputs are written; None if it is their own.

        In files of some architectures, the two numbers that are rotated together are neighbours.
        """
        if not self.form.pairs_are_neighbours or not re.search(r"\.[qk]_proj\.", stored):
            return None
        rows = torch.arange(num_rows).view(-1, 2, self.head_dim // 2)
        return rows.transpose(1, 2).flatten()

    def shift(self, stored: str) -> float:
        """What is added to a tensor's numbers."""
        return 1.0 if self.form.norms_plus_one and stored.endswith("norm.weight") else 0.0

    def rope_tensors(self) -> dict[str, Tensor]:
        """Factors of rotary frequencies in float32, which files have as tensors."""
        divisors, rope = self._llama3_divisors(), self._rope
        if divisors is not None:
            return {"rope_freqs.weight": divisors}
        if self._rope_kind != "longrope":
            return {}
        return {
            f"rope_factors_{length}.weight": torch.tensor(rope[f"{length}_factor"])
            for length in ("long", "short")
        }

    def _llama3_divisors(self) -> Tensor | None:
        """Llama 3's divisors of the rotary frequencies, float32 [head_dim / 2]; None without.

        https://github.com/huggingface/transformers, ``_compute_llama3_parameters``
        """
        rope = self._rope
        if self._rope_kind != "llama3":
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
