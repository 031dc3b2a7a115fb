"""Miniature configurations of the native families, one or more for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""What most configurations of transformers take. Nothing but sizes and special tokens."""


@dataclass(frozen=True, slots=True)
class Case:
    """A miniature model.

    Attributes:
        config: name of transformers' configuration class.
        values: its arguments.
        stored: what config.json says otherwise, for both sides; ``...`` removes a key.
        model: name of transformers' model class, where it is not the causal LM of ``config``.
        embedding_std: of the token vectors before the model scales them.
        shortest: length of prompts where transformers computes shorter ones in another way.
    """

    config: str
    values: Mapping[str, Any]
    stored: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    embedding_std: float = 0.1
    shortest: int = 0


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CASES: dict[str, Case] = {
    "Llama 3": Case("LlamaConfig", SMALL | {"rope_parameters": LLAMA3_ROPE}),
    "Mistral": Case("MistralConfig", SMALL | {"sliding_window": 40}),
}
