"""How a stream ends whose engine is gone, for servers that pass on streams of others."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tgi_cli.router.api.openai_common import fail_stream
from tgi_cli.router.http.error_styles import ANTHROPIC, RESPONSES, TGI, ErrorStyle, tgi_body
from tgi_cli.router.http.errors import ApiError


def is_event_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether these are the headers of a stream of events."""
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in headers
    )


def failure_events(style: ErrorStyle, error: ApiError) -> bytes:
    """The events that end a stream with an error, in the form of its API."""
    if style is TGI:
        return b"data: %b\n\n" % tgi_body(error)
    if style is ANTHROPIC:
        return b"event: error\ndata: %b\n\n" % ANTHROPIC.body(error)
    if style is RESPONSES:
        event = {
            "type": "error",
            "code": error.response_code,
            "message": error.openai_message,
            "param": None,
            "sequence_number": 0,
        }
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(event)
    return fail_stream(error)
