"""Images within texts: marks, parts of messages, and TGI's Markdown."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import pytest

from tgi_cli.text.images import (
    ImageMarks,
    ImagePart,
    markdown_images,
    with_image_parts,
    with_images_behind_results,
)
from tgi_cli.text.spans import Spans, repeated

Message = dict[str, Any]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def tool(content: str) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": "c"}


def test_marks_cannot_be_guessed_and_survive_json() -> None:
    marks, others = ImageMarks(), ImageMarks()
    assert marks.mark != others.mark
    assert json.loads(json.dumps(marks.mark)) == marks.mark
    assert json.dumps(marks.mark) == f'"{marks.mark}"'


def test_images_are_kept_in_their_order() -> None:
    marks = ImageMarks()
    first, second = ImagePart("data:a"), ImagePart(b"b", "low")
    text = f"a{marks.add(first)}b{marks.add(second)}"
    assert marks.images == [first, second]
    assert text == f"a{marks.mark}b{marks.mark}"


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("M", [{"type": "image"}]),
        ("MM", [{"type": "image"}, {"type": "image"}]),
        ("aM", [{"type": "text", "text": "a"}, {"type": "image"}]),
        (
            "aMb\nMc",
            [
                {"type": "text", "text": "a"},
                {"type": "image"},
                {"type": "text", "text": "b\n"},
                {"type": "image"},
                {"type": "text", "text": "c"},
            ],
        ),
    ],
)
def test_a_text_with_marks_becomes_parts(content: str, parts: list[Any]) -> None:
    assert with_image_parts({**user(content), "name": "n"}, "M") == {
        "role": "user",
        "name": "n",
        "content": parts,
    }


@pytest.mark.parametrize("content", ["a", "", None, [{"type": "image"}]])
def test_other_contents_remain(content: Any) -> None:
    message = {"role": "user", "content": content}
    assert with_image_parts(message, "M") == message


def test_marks_are_replaced_for_templates_that_take_texts() -> None:
    marks = ImageMarks()
    mark = marks.add(ImagePart("data:"))
    calls = {"role": "assistant", "content": None, "tool_calls": []}
    found = marks.replaced([user(f"a{mark}"), calls, user("b")], "<image>")
    assert found == [user("a<image>"), calls, user("b")]


class TestResults:
    def test_images_of_results_follow_them(self) -> None:
        told = [user("a"), tool("xM"), tool("M"), user("b")]
        assert with_images_behind_results(told, "M") == [
            user("a"),
            tool("x"),
            tool("The result is the image that follows."),
            user("MM"),
            user("b"),
        ]

    def test_at_the_end_of_the_conversation(self) -> None:
        assert with_images_behind_results([user("a"), tool("xMM")], "M") == [
            user("a"),
            tool("x"),
            user("MM"),
        ]

    def test_images_of_the_user_stay(self) -> None:
        told = [user("aM"), tool("x"), user("M")]
        assert with_images_behind_results(told, "M") == told


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a", ["a"]),
        ("", [""]),
        ("![](u)", ["", "u", ""]),
        ("a![](u)b![](v)", ["a", "u", "b", "v", ""]),
        ("![]()", ["", "", ""]),
        ("![](u", ["![](u"]),
        ("![x](u)", ["![x](u)"]),
        ("![](u(v)w)", ["", "u(v", "w)"]),
    ],
)
def test_markdown_images_are_tgis(text: str, pieces: list[str]) -> None:
    """As its regular expression finds them: ``!\\[\\]\\([^\\)]*\\)``."""
    assert list(markdown_images(text)) == pieces


def test_tokens_of_images_are_repeated_over_the_same_characters() -> None:
    spans = Spans([5, 9, 9, 6, 9], [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)], start=10)
    counts = deque([3, 1])
    found = repeated(spans, 9, counts)
    assert list(found) == [
        (5, 10, 11),
        *[(9, 11, 12)] * 3,
        (9, 12, 13),
        (6, 13, 14),
        (9, 14, 15),
    ]
    assert not counts, "the rest of the text has no images"
    assert repeated(spans, 9, counts) is spans
