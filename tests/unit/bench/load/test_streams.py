"""Answers as each route streams them: times, counts, text, usage, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tgi_cli.bench.load.streams import StreamedResponse, error_message
from tgi_cli.bench.settings import Route


def answer(route: Route, *events: Any, cut: int = 10**9, done: bool = True) -> StreamedResponse:
    """An answer whose bytes come ``cut`` at a time, a second apart."""
    data = b"".join(
        b"data: " + (e.encode() if isinstance(e, str) else json.dumps(e).encode()) + b"\n\n"
        for e in events
    )
    if done and route != "generate_stream":
        data += b"data: [DONE]\n\n"
    found = StreamedResponse()
    found.head(200, "text/event-stream; charset=utf-8")
    for number, begin in enumerate(range(0, len(data), cut)):
        found.body(data[begin : begin + cut], float(number))
    found.complete()
    return found


def text(piece: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": piece, "index": 0}], **more}


def delta(**parts: Any) -> dict[str, Any]:
    return {"choices": [{"delta": parts}]}


def test_native_events_are_a_token_each() -> None:
    events = [
        {"index": 1, "token": {"id": 5, "text": "a", "special": False}, "generated_text": None},
        {"index": 2, "token": {"id": 6, "text": "", "special": False}, "generated_text": None},
        {
            "index": 3,
            "token": {"id": 2, "text": "</s>", "special": True},
            "generated_text": "ab",
            "details": {"finish_reason": "eos_token", "generated_tokens": 3, "input_length": 8},
        },
    ]
    found = answer("generate_stream", *events)
    assert (found.counts, found.pieces) == ([1, 1, 1], ["ab"])
    assert (found.input_tokens, found.output_tokens) == (8, 3)
    assert (found.finish_reason, found.error) == ("eos_token", None)


def test_empty_deltas_and_comments_are_no_first_token() -> None:
    found = StreamedResponse()
    found.head(200, "text/event-stream")
    found.body(b": keep-alive\n\n", 1.0)
    found.body(b"data: " + json.dumps(delta(role="assistant", content="")).encode() + b"\n\n", 2.0)
    found.body(b"data: " + json.dumps(delta(content="hi")).encode() + b"\r\n\r\n", 3.0)
    found.body(b"data: [DONE]\n\n", 4.0)
    found.complete()
    assert (found.arrivals, found.pieces, found.touched) == ([3.0], ["hi"], 4.0)
    assert found.error is None


@pytest.mark.parametrize("cut", [1, 7, 64])
def test_events_may_come_in_any_pieces(cut: int) -> None:
    found = answer("completions", text("a"), text("b\u20ac"), text("c"), cut=cut)
    assert found.pieces == ["a", "b\u20ac", "c"]
    assert found.arrivals == sorted(found.arrivals)


def test_reasoning_and_tool_calls_are_content() -> None:
    found = answer(
        "chat",
        delta(reasoning_content="hm"),
        delta(reasoning="hm"),
        delta(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": "{"}}]),
        delta(content=None),
    )
    assert len(found.arrivals) == 3


def test_counts_come_from_a_usage_that_runs_along() -> None:
    def usage(count: int) -> dict[str, Any]:
        return {"usage": {"prompt_tokens": 4, "completion_tokens": count}}

    found = answer(
        "completions", text("ab", **usage(2)), text("c", **usage(3)), text("d", **usage(7))
    )
    assert found.counts == [2, 1, 4]
    assert (found.input_tokens, found.output_tokens) == (4, 7)


def test_usage_at_the_end_does_not_change_event_counts() -> None:
    usage = {"usage": {"prompt_tokens": 4, "completion_tokens": 9}}
    found = answer("completions", text("ab"), text("c", **usage))
    assert found.counts == [1, 1]
    assert found.output_tokens == 9
    last = answer("completions", text("ab"), {"choices": [], **usage})
    assert (last.counts, last.output_tokens) == ([1], 9)


def test_counts_come_from_logprobs() -> None:
    several = {"content": [{"token": "a"}, {"token": "b"}]}
    found = answer("chat", {"choices": [{"delta": {"content": "ab"}, "logprobs": several}]})
    assert found.counts == [2]


@pytest.mark.parametrize(
    ("route", "event", "kind", "detail"),
    [
        (
            "generate_stream",
            {"error": "Model is overloaded", "error_type": "overloaded"},
            "stream overloaded",
            "Model is overloaded",
        ),
        ("chat", {"error": {"message": "boom", "http_status_code": 422}}, "stream", "boom"),
        ("chat", {"error": {"message": "no", "type": "rate_limit"}}, "stream rate_limit", "no"),
        ("completions", {"error": "text"}, "stream", "text"),
        ("completions", "{no json", "protocol", "is invalid"),
        ("completions", {"choices": [{"text": 5}]}, "protocol", "is invalid"),
    ],
)
def test_errors_in_a_stream_are_errors(route: Route, event: Any, kind: str, detail: str) -> None:
    found = answer(route, event)
    assert found.error == kind
    assert detail in found.detail


@pytest.mark.parametrize("route", ["generate_stream", "completions", "chat"])
def test_a_stream_that_just_ends_was_cut_off(route: Route) -> None:
    events = {
        "generate_stream": {"token": {"id": 1, "text": "a"}},
        "completions": text("a"),
        "chat": delta(content="a"),
    }
    found = answer(route, events[route], done=False)
    assert (found.error, len(found.arrivals)) == ("cut off", 1)


def test_a_response_with_a_finish_reason_needs_no_done() -> None:
    chunk = {"choices": [{"text": "a", "finish_reason": "stop"}]}
    assert answer("completions", chunk, done=False).error is None
    empty = {"choices": [{"text": "a", "finish_reason": ""}]}  # TGI's, of chunks that go on
    assert answer("completions", empty, done=False).error == "cut off"


def test_other_statuses_and_types_are_errors_with_their_message() -> None:
    found = StreamedResponse()
    found.head(429, "application/json")
    found.body(b'{"error": "Model is ', 1.0)
    found.body(b'overloaded", "error_type": "overloaded"}', 2.0)
    found.complete()
    assert (found.error, found.detail) == ("http 429", "Model is overloaded")
    page = StreamedResponse()
    page.head(200, "text/html")
    page.body(b"<html>", 1.0)
    page.complete()
    assert page.error == "protocol"
    assert "text/html" in page.detail


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "bad key", "type": "x"}}', "bad key"),
        (b'{"detail": [{"loc": ["body"]}]}', '[{"loc":["body"]}]'),
        (b"plain", "plain"),
        (b"", ""),
        (b"\xff", "\ufffd"),
    ],
)
def test_bodies_of_errors_are_shown_in_short(body: bytes, said: str) -> None:
    assert error_message(body) == said
