"""Qwen 3.5 (https://huggingface.co/collections/Qwen/qwen35): of multimodal models, the text part.

Three layers of Gated DeltaNet to one of attention, whose output is gated and of whose heads a
quarter is rotated. Dense, or with experts and one that every token passes.
"""

from __future__ import annotations

from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig, text_part
from tgi_cli.models.delta_fields import stacked_qkv
from tgi_cli.models.qwen_hybrid import CONDITIONAL_SUFFIX, Table, dense, experts, hybrid
from tgi_cli.models.spec import DecoderSpec, DeltaSpec

_DENSE: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
_SPARSE = _DENSE | {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2}


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/qwen3_5 and .../qwen3_5_moe"""
    sparse = "Moe" in config.architecture
    if config.architecture.endswith(CONDITIONAL_SUFFIX):
        config = text_part(config)
    config = config_fields.on_three_axes(config, (11, 11, 10), interleaved=True)
    config = config_fields.filled(config, _SPARSE if sparse else _DENSE)
    mlp = experts(config, 256, 8) if sparse else dense(config)
    return hybrid(config, lambda _: mlp, _flat)


def _flat(delta: DeltaSpec) -> Table:
    return {
        **stacked_qkv(delta, "proj", "linear_attn.in_proj_qkv"),
        **{f"linear_attn.{part}_proj": f"linear_attn.in_proj_{part}" for part in "zba"},
    }
