"""The decoders of Qwen2-VL (https://arxiv.org/abs/2409.12191), Qwen2.5-VL
(https://arxiv.org/abs/2502.13923) and Qwen3-VL (https://arxiv.org/abs/2511.21631).

Qwen 2's, Qwen 3's and Qwen3-MoE's, with rotary positions on three axes: in an image, rows and
columns are counted apart. Qwen3-VL also adds features of images after its first layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import TEXT_ALONE, ModelConfig, text_part
from tgi_cli.models.families import qwen, qwen_moe
from tgi_cli.models.spec import DecoderSpec
from tgi_cli.models.weight_files import file_header
from tgi_cli.models.weight_map import (
    Names,
    Source,
    StackedExperts,
    decoder_names,
    has_tensor,
)

_SECOND: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_THIRD: dict[str, Any] = {"max_position_embeddings": 128000, "rope_theta": 5e5}
_SPARSE = _THIRD | {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "num_experts": 60,
}

_WITHIN = "model.language_model"


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/qwen2_5_vl and .../qwen3_vl"""
    third, sparse = config.architecture.startswith("Qwen3"), "Moe" in config.architecture
    vision = config.get("vision_config", dict, {})
    defaults = _SPARSE if sparse else _THIRD if third else _SECOND
    text = config_fields.filled(_text(config), defaults)
    if third:
        fixed = {"use_sliding_window": False, "norm_topk_prob": True}
        text = replace(text, raw=text.raw | fixed)
    sections = (24, 20, 20) if third else (16, 24, 24)
    text = config_fields.on_three_axes(text, sections, interleaved=third)
    spec = qwen_moe.read(text) if sparse else qwen.read(text)
    # What was published before transformers 5 has the decoder beside the tower.
    root = _WITHIN if has_tensor(config.path, f"{_WITHIN}.norm.weight") else "model"
    names = replace(qwen_moe.NAMES, layers=f"{root}.layers", top=decoder_names(root, {}).top)
    return replace(
        spec,
        deepstack=len(vision.get("deepstack_visual_indexes", (8, 16, 24))) if third else 0,
        source=_source(names, text) if sparse else names,
        ignored=(r"(model\.)?visual\..*",),
        notice=TEXT_ALONE,
    )


def _text(config: ModelConfig) -> ModelConfig:
    """The decoder's configuration, which older files of Qwen2-VL and Qwen2.5-VL have at the top."""
    inner = config.get("text_config", dict, {})
    if "hidden_size" in config.raw and "hidden_size" not in inner:
        return config
    # Of Qwen3-VL, the inner file's word on tied embeddings does not count.
    second = config.architecture.startswith("Qwen2")
    tied = second and inner.get("tie_word_embeddings") is True
    return text_part(
        replace(config, raw=config.raw | {"tie_word_embeddings": True}) if tied else config
    )


def _source(names: Names, text: ModelConfig) -> Callable[[str], Source]:
    """Experts are stacked, in what was published the other way around."""
    hidden_size = text.positive("hidden_size")
    for file in sorted(text.path.glob("*.safetensors")):
        header = file_header(file) if file.is_file() else {}
        for name, entry in header.items():
            if name.endswith(".experts.gate_up_proj"):
                turned = entry.shape[1] == hidden_size != entry.shape[2]
                return partial(_turned, names) if turned else StackedExperts(names)
    return names


def _turned(names: Names, name: str) -> Source:
    source = StackedExperts(names)(name)
    return replace(source, transposed=True) if ".experts." in name else source
