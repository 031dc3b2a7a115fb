"""What requests say, by route."""

from __future__ import annotations

from typing import Any

import msgspec

from tgi_cli.bench.events import Request
from tgi_cli.bench.settings import Route, Sampling, Settings

PATHS: dict[Route, str] = {
    "generate_stream": "/generate_stream",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}
_DRAWN = ("temperature", "top_k", "top_p", "typical_p")


def body(
    route: Route,
    settings: Settings,
    model: str,
    request: Request,
    said: list[dict[str, str]] | str,
    usage: bool,
) -> bytes:
    """The JSON of one request.

    Args:
        said: the whole prompt, or all messages.
        usage: ask for a usage at the end of OpenAI's streams.
    """
    if route == "generate_stream":
        parameters: dict[str, Any] = {"max_new_tokens": request.max_tokens, "details": True}
        content: dict[str, Any] = {
            "inputs": said,
            "parameters": parameters | given(settings.sampling),
        }
    else:
        content = {
            "model": model,
            "messages" if route == "chat" else "prompt": said,
            "max_tokens": request.max_tokens,
            "stream": True,
        }
        content |= _openai(settings.sampling)
        if usage:
            content["stream_options"] = {"include_usage": True}
        if settings.ignore_eos:
            content["ignore_eos"] = True
    return msgspec.json.encode(content | settings.extra_body)


def given(sampling: Sampling) -> dict[str, Any]:
    """What was asked for, by TGI's names."""
    return {
        name: value
        for name, value in msgspec.structs.asdict(sampling).items()
        if value is not None and value is not False
    }


def _openai(sampling: Sampling) -> dict[str, Any]:
    """The same by OpenAI's: greedy, as TGI is, unless something says that tokens are drawn."""
    said = given(sampling)
    drawn = said.pop("do_sample", False) or any(name in said for name in _DRAWN)
    return said if drawn else said | {"temperature": 0}
