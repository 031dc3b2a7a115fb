"""Formats of reasoning that are known by name."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from tgi_cli.text.formats.syntax import Field

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names of the reasoning region in response templates."""
DROPPED_FIELD = "dropped"
"""Name of the region of marks that are neither reasoning nor content."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A format of reasoning.

    Attributes:
        region: Field of a response template, of the reasoning.
        marks: Groups of texts. A model that has all texts of a group, in its chat template or as
            tokens, uses the format.
        content: Field of the content, if it is marked, too.
        start: Text of the prompt that the response follows, or None if unknown.
        dropped: Marks around the content that may also be missing.
        dropped_around: Marks that are dropped only after the reasoning, and at the end.
    """

    region: Field
    marks: tuple[tuple[str, ...], ...] = ()
    content: Field = field(default_factory=dict)
    start: str | None = None
    dropped: tuple[str, ...] = ()
    dropped_around: tuple[str, str] | None = None

    def fields(self) -> dict[str, Field]:
        """The fields of a response template."""
        fields = {"content": self.content, "reasoning_content": self.region}
        marks = [re.escape(mark) for mark in self.dropped]
        if self.dropped_around is not None:
            first, last = map(re.escape, self.dropped_around)
            behind = re.escape(self.region["close"])
            marks += [rf"(?<={behind}\s{{0,64}}){first}", rf"{last}\s{{0,64}}\Z"]
        if marks:
            fields[DROPPED_FIELD] = {
                "open_pattern": "|".join(marks),
                "close_pattern": "(?:)",
                "repeats": True,
            }
        return fields


def between(opening: str, close: str, *marks: tuple[str, ...], **options: Any) -> ReasoningFormat:
    """Reasoning between two texts. By default, a model with the first of them uses the format."""
    return ReasoningFormat({"open": opening, "close": close}, marks or ((opening,),), **options)


def _with_content_tag(tag: str) -> ReasoningFormat:
    """``<think>`` whose content may be between ``<tag>`` and ``</tag>``."""
    return between(
        "<think>", "</think>", ("<think>", f"<{tag}>"), dropped_around=(f"<{tag}>", f"</{tag}>")
    )


_HARMONY_MARKS = (("<|channel|>", "<|message|>"),)

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "harmony": ReasoningFormat(
        {"open": "<|channel|>analysis<|message|>", "close": "<|end|>", "repeats": True},
        _HARMONY_MARKS,
        content={
            "open": ["<|channel|>final<|message|>", "<|channel|>commentary<|message|>"],
            "close": ["<|end|>", "<|return|>"],
            "repeats": True,
        },
        start="<|start|>assistant",
    ),
    "kimi_k3": between(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        ("<|open|>", "<|close|>", "<|sep|>"),
        dropped=(
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
        ),
    ),
    "gemma4": between("<|channel>thought\n", "<channel|>", ("<|channel>", "<channel|>")),
    "cohere": between("<|START_THINKING|>", "<|END_THINKING|>"),
    "apertus": between("<|inner_prefix|>", "<|inner_suffix|>"),
    "minimax_m3": between("<mm:think>", "</mm:think>"),
    "hunyuan_v3": between("<think:opensource>", "</think:opensource>"),
    "longcat": between("<longcat_think>", "</longcat_think>"),
    "kimi": between("◁think▷", "◁/think▷"),
    "solar": between(
        "<|think|>",
        "<|end|>",
        ("<|think|>", "<|content|>"),
        dropped=("<|begin|>assistant", "<|content|>"),
    ),
    "mistral": between("[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),
    "seed_oss": between("<seed:think>", "</seed:think>", ("<seed:think>",), ("seed:think",)),
    "granite": between("Here is my thought process:", "Here is my response:"),
    "apriel": between("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    "think_response": _with_content_tag("response"),
    "think_answer": _with_content_tag("answer"),
    "think": between("<think>", "</think>", ("<think>",), ("</think>",)),
}
"""Reasoning formats by the names of ``--reasoning-parser``; the first that fits is used."""
