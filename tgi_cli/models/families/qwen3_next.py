"""Qwen3-Next (https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct).

As Qwen 3.5 with experts; the checkpoint has the projections of each key head together, GGUF files
those of all heads apart.
"""

from __future__ import annotations

from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.delta_fields import stacked_qkv
from tgi_cli.models.families.qwen_moe import sparse_layers
from tgi_cli.models.qwen_hybrid import Table, dense, experts, hybrid
from tgi_cli.models.spec import DecoderSpec, DeltaSpec, MLPSpec, MoESpec
from tgi_cli.models.weight_map import has_tensor, interleaved

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
}


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/qwen3_next"""
    config = config_fields.filled(config, _DEFAULTS)
    sparse = sparse_layers(config, config.positive("num_hidden_layers"))

    def mlp(layer: int) -> MLPSpec | MoESpec:
        return experts(config, 512, 10) if layer in sparse else dense(config)

    # Older GGUF files have them as checkpoints do.
    apart = config.is_gguf and has_tensor(config.path, "blk.0.attn_qkv.weight")
    return hybrid(config, mlp, _apart if apart else _packed)


def _apart(delta: DeltaSpec) -> Table:
    return {
        **stacked_qkv(delta, "proj", "linear_attn.in_proj_qkv"),
        "linear_attn.z_proj": "linear_attn.in_proj_z",
        **_steps(delta),
    }


def _packed(delta: DeltaSpec) -> Table:
    """Rows of a key head: its query and key, and values and gates of the value heads it serves."""
    shared = delta.num_value_heads // delta.num_key_heads
    wide = {
        "q": delta.key_dim,
        "k": delta.key_dim,
        "v": shared * delta.value_dim,
        "z": shared * delta.value_dim,
    }
    return {
        **interleaved(delta.num_key_heads, _slices(wide), 1, "linear_attn.in_proj_qkvz"),
        **_steps(delta),
    }


def _steps(delta: DeltaSpec) -> Table:
    """What value heads write and forget by, of a key head together."""
    shared = delta.num_value_heads // delta.num_key_heads
    parts = _slices({"b": shared, "a": shared})
    return interleaved(delta.num_key_heads, parts, 1, "linear_attn.in_proj_ba")


def _slices(sizes: dict[str, int]) -> dict[str, slice]:
    """Where each projection is among the outputs of a key head."""
    slices, start = {}, 0
    for part, size in sizes.items():
        slices[f"linear_attn.{part}_proj"] = slice(start, start + size)
        start += size
    return slices
