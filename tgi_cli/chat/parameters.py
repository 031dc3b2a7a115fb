"""Parameters of requests that ``/set``, ``--set`` and flags change."""

from __future__ import annotations

import json
from typing import Any

from tgi_cli.chat.errors import ChatInputError
from tgi_cli.config.settings.values import FRACTION, RATIO, ValueKind, number, text, whole


def _json(word: str) -> Any:
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        raise ValueError(f"{word[:40]!r} is not JSON") from None


def _stop(word: str) -> list[str]:
    """Stop strings: a JSON list, or one string."""
    value = _json(word) if word.startswith("[") else [word]
    if not (isinstance(value, list) and value and all(isinstance(each, str) for each in value)):
        raise ValueError(f"{word[:40]!r} is not a list of strings")
    return value


PARAMETERS: dict[str, ValueKind] = {
    "temperature": RATIO,
    "top_p": FRACTION,
    "top_k": whole(-1),
    "min_p": number(0, 1),
    "max_tokens": whole(1),
    "seed": whole(0),
    "stop": ValueKind(str, "TEXT", _stop),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": RATIO,
    "reasoning_effort": text("none|low|medium|high"),
    "thinking_token_budget": whole(0),
    "chat_template_kwargs": ValueKind(str, "JSON", _json),
    "response_format": ValueKind(str, "JSON", _json),
}
"""Parameters by their names in requests: OpenAI's, then those of vLLM and TGI."""

UNSET = "default"
"""The word that makes a parameter the server's own choice again."""


def parse_parameter(name: str, word: str) -> Any:
    """Parse the value of a parameter; None for ``default``.

    Raises:
        ChatInputError: an unknown name, or an invalid value.
    """
    kind = PARAMETERS.get(name)
    if kind is None:
        raise ChatInputError(f"there is no parameter {name!r}", f"one of {', '.join(PARAMETERS)}")
    if word == UNSET:
        return None
    try:
        return kind.read(word)
    except ValueError as error:
        raise ChatInputError(f"{name}: {error}", f"/set {name} {kind.metavar}") from None


def parse_assignment(word: str) -> tuple[str, Any]:
    """Parse ``NAME=VALUE``. Raises ChatInputError."""
    name, equals, value = word.partition("=")
    if not equals:
        raise ChatInputError(f"--set {word!r} is not NAME=VALUE", "for example --set top_p=0.9")
    return name.strip(), parse_parameter(name.strip(), value.strip())
