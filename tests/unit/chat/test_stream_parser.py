"""Streams as servers send them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tools.chat_server import DONE, delta, event, usage
from tgi_cli.chat.errors import ChatServerError
from tgi_cli.chat.stream_parser import (
    AnswerPart,
    CalledTool,
    ChatStreamParser,
    ChatUsage,
    read_answer,
)

STREAM = (
    delta(role="assistant", content="")
    + delta(reasoning_content="Hm, ", reasoning="Hm, ")
    + delta(reasoning="ä.")
    + delta(content="Grüße")
    + b": a comment that keeps the connection alive\n\n"
    + delta(content="!")
    + delta("stop")
    + usage(12, 5, 8)
    + DONE
)


def parse(data: bytes, size: int) -> tuple[list[AnswerPart], ChatStreamParser]:
    parser = ChatStreamParser()
    parts = [p for i in range(0, len(data), size) for p in parser.push(data[i : i + size])]
    return [*parts, *parser.finish()], parser


@pytest.mark.parametrize("size", [1, 5, 64, 10_000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_a_stream_in_pieces_of_any_size(size: int, line_end: bytes) -> None:
    parts, parser = parse(STREAM.replace(b"\n", line_end), size)
    assert "".join(part.content for part in parts) == "Grüße!"
    assert "".join(part.reasoning for part in parts) == "Hm, ä."
    assert parts[-2].finish_reason == "stop"
    assert parts[-1].usage == ChatUsage(12, 5, 8)
    assert parser.complete


def test_a_stream_that_breaks_off_is_not_complete() -> None:
    parts, parser = parse(STREAM[: STREAM.index(b'"!"')], 100)
    assert not parser.complete
    assert parts[-1].content == "Grüße"


def test_a_last_event_without_an_empty_line_counts() -> None:
    parts, parser = parse(delta("stop", content="x").rstrip(b"\n"), 7)
    assert (parts[0].content, parser.complete) == ("x", True)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (event(error={"message": "CUDA is gone"}), "the server failed: CUDA is gone"),
        (event(error="overloaded", error_type="x"), "the server failed: overloaded"),
        (b"data: <html>\n\n", "not JSON: <html>"),
        (b"data: 3\n\n", "not an object"),
    ],
)
def test_errors_within_a_stream(data: bytes, words: str) -> None:
    with pytest.raises(ChatServerError, match=words):
        parse(delta(content="x") + data, 1000)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"message": {"content": "whole"}}, AnswerPart(content="whole")),
        ({"delta": {"content": None, "refusal": "No."}}, AnswerPart(content="No.")),
        (
            {
                "delta": {
                    "content": [
                        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                        {"type": "text", "text": "yes"},
                    ]
                }
            },
            AnswerPart(content="yes", reasoning="hm"),
        ),
        (
            {"delta": {"tool_calls": [{"index": 1, "function": {"name": "f", "arguments": "{}"}}]}},
            AnswerPart(calls=(CalledTool(1, "f", "{}"),)),
        ),
        ({"delta": None}, AnswerPart()),
        ({"delta": {"content": 3, "reasoning": []}, "finish_reason": 4}, AnswerPart()),
    ],
)
def test_forms_of_an_answer(fields: dict[str, Any], part: AnswerPart) -> None:
    assert read_answer({"choices": [fields]}) == part
    assert read_answer(json.loads(json.dumps({"choices": [fields], "usage": None}))) == part


def test_llama_cpp_counts_in_timings() -> None:
    timings = {"prompt_n": 3, "cache_n": 9, "predicted_n": 7}
    assert read_answer({"choices": [], "timings": timings}).usage == ChatUsage(12, 7, 9)
    assert read_answer({"choices": []}).usage is None
