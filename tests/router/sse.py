"""A strict parser of event streams, for TGI's framing and OpenAI's named events."""

from __future__ import annotations

import json
from typing import Any


def events(body: str) -> list[Any]:
    """The events of a stream: JSON, or the bare string of ``[DONE]``."""
    assert body.endswith("\n\n")
    found = []
    for frame in body.removesuffix("\n\n").split("\n\n"):
        if frame.startswith("event: "):
            name, _, frame = frame.partition("\n")
            assert json.loads(frame.removeprefix("data: "))["type"] == name.removeprefix("event: ")
        assert frame.startswith("data: ")
        assert "\n" not in frame
        data = frame.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found
