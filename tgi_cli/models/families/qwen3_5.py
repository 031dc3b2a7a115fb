"""Qwen 3.5 (https://huggingface.co/collections/Qwen/qwen35): of multimodal models, the text part.

Three layers of Gated DeltaNet to one of attention, whose output is gated and of whose heads a
quarter is rotated. Dense, or with experts and one that every token passes.
"""

from __future__ import annotations

from tgi_cli.models.config import ModelConfig, text_part
from tgi_cli.models.delta_fields import stacked_qkv
from tgi_cli.models.qwen_hybrid import SEEING, Table, dense, experts, hybrid
from tgi_cli.models.spec import DecoderSpec, DeltaSpec


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/qwen3_5 and .../qwen3_5_moe"""
    sparse = "Moe" in config.architecture
    if config.architecture.endswith(SEEING):
        config = text_part(config)
    mlp = experts(config, 256, 8) if sparse else dense(config)
    return hybrid(config, lambda _: mlp, 2 if sparse else 4, _flat)


def _flat(delta: DeltaSpec) -> Table:
    return {
        **stacked_qkv(delta, "proj", "linear_attn.in_proj_qkv"),
        **{f"linear_attn.{part}_proj": f"linear_attn.in_proj_{part}" for part in "zba"},
    }
