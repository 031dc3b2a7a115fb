"""Reasoning between tags, in pieces of any size."""

from __future__ import annotations

import pytest

from tgi_cli.chat.reasoning_tags import ReasoningTagSplitter


def split(text: str, size: int) -> tuple[str, str]:
    """The reasoning and the content of a message that arrives in pieces."""
    splitter = ReasoningTagSplitter()
    reasoning = content = ""
    pieces = [splitter.push(text[i : i + size]) for i in range(0, len(text), size)]
    for piece in [*pieces, splitter.finish()]:
        if piece.was_reasoning:
            reasoning, content = reasoning + content, ""
        reasoning += piece.reasoning
        content += piece.content
    return reasoning, content


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("Hello.", "", "Hello."),
        ("<think>\nSo.\n</think>\n\nHello.", "So.\n", "Hello."),
        ("\n<think></think>Hello.", "", "Hello."),
        ("[THINK]So.[/THINK]Hello.", "So.", "Hello."),
        ("<thinking>a</think> b</thinking>c", "a</think> b", "c"),
        ("So it is.\n</think>\nHello.", "So it is.\n", "Hello."),  # opened by the prompt
        ("<think>never closed", "never closed", ""),
        ("<", "", "<"),
        ("<thin ice>", "", "<thin ice>"),
        ("a < b, and </thin", "", "a < b, and </thin"),
        ("<think>a</think>b <think>c</think>", "a", "b <think>c</think>"),
        ("", "", ""),
    ],
)
def test_split(text: str, size: int, reasoning: str, content: str) -> None:
    assert split(text, size) == (reasoning, content)


def test_content_is_not_held_back_for_longer_than_a_tag_takes() -> None:
    splitter = ReasoningTagSplitter()
    assert splitter.push("Hel").content == "Hel"
    assert splitter.push("lo </").content == "lo "
    assert splitter.push("b>").content == "</b>"
