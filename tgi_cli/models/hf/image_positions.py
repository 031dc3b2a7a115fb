"""What images change in transformers' decoders: positions on three axes, bidirectional spans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from tgi_cli.attention import KVSpec

_THREE_AXES = frozenset(
    {"glm46v", "glm4v", "glm4v_moe", "glm_ocr", "paddleocr_vl"}
    | {"qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"}
)
"""Model types that count the rows and columns of an image from the position that it begins at, and
go on after it by the larger number of them."""

WHOLE_PROMPTS = frozenset({"paligemma"})
"""Model types in which all tokens of a prompt see each other."""


def position_axes(config: Any) -> int:
    """Axes of the positions within images, for transformers' configuration of a whole model."""
    return 3 if config.model_type in _THREE_AXES else 1


def counts_otherwise(config: Any, decoder: nn.Module) -> bool:
    """Whether the positions within images have axes that are not counted as is known here."""
    has_axes = any(hasattr(module, "mrope_section") for module in decoder.modules())
    return has_axes and position_axes(config) == 1


def with_spans(config: Any, specs: list[KVSpec]) -> list[KVSpec]:
    """The caches of a model with what the tokens of bidirectional spans see."""
    if config.model_type not in WHOLE_PROMPTS:
        return specs
    return [replace(spec, spans="whole") for spec in specs]
