"""Detects which known formats a model uses, and composes its response template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tgi_cli.text.formats.reasoning import ReasoningFormat
from tgi_cli.text.formats.syntax import ToolFormat

ANY_START = r"\A"
"""Start pattern of templates that do not define where a model's turns begin."""

PARSERS = ("auto", "none")
"""Values of ``--tool-call-parser`` and ``--reasoning-parser`` beside the names of formats."""

FALLBACK = "hermes"
"""Format that models are prompted for if their chat template does not support tools."""


def detect(
    formats: Mapping[str, ToolFormat] | Mapping[str, ReasoningFormat], has: Callable[[str], bool]
) -> str | None:
    """The first format whose marks a model has, or None."""
    for name, form in formats.items():
        if any(all(map(has, group)) for group in form.marks):
            return name
    return None


def compose(tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> dict[str, Any] | None:
    """The response template of two formats together, or None if nothing is marked."""
    fields: dict[str, Any] = {"content": {}}
    start = None
    if reasoning is not None:
        fields |= {name: dict(region) for name, region in reasoning.fields().items()}
        start = reasoning.start
    if tools is not None:
        fields["tool_calls"] = dict(tools.region)
    if len(fields) == 1:
        return None
    anchor = {"start_anchor": start} if start else {"start_anchor_pattern": ANY_START}
    return {**anchor, "fields": fields}
