"""What to request instead of an unknown path: that of a base URL which is wrong by a part, or of
another server's API."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

_TEXT = "the model generates text"
_OLLAMA = "Ollama's API is not served; use OpenAI's: /v1/chat/completions, /v1/models"
_OTHERS = {
    "/api/chat": _OLLAMA,
    "/api/generate": _OLLAMA,
    "/api/tags": _OLLAMA,
    "/api/show": _OLLAMA,
    "/api/ps": _OLLAMA,
    "/api/version": _OLLAMA,
    "/api/pull": _OLLAMA,
    "/api/embed": _TEXT,
    "/api/embeddings": _TEXT,
    "/completion": "use /v1/completions",
    "/props": "use /info and /v1/models",
    "/slots": "use /metrics",
    "/apply-template": "use /chat_tokenize",
    "/lora-adapters": "use /v1/models",
    "/openapi.json": "use /api-doc/openapi.json",
    "/embed": _TEXT,
    "/embedding": _TEXT,
    "/rerank": _TEXT,
    "/reranking": _TEXT,
    "/score": _TEXT,
    "/pooling": _TEXT,
    "/classify": _TEXT,
    "/audio/": _TEXT,
    "/images/": _TEXT,
    "/": "the routes of /v1 are below it, as /v1/models",
}
"""Routes of Ollama, llama.cpp, vLLM, TEI and FastAPI, with or without ``/v1``, and what there is
instead. A slash at the end stands for all paths below."""


_CHARACTERS = 256
"""Length of paths that are looked at."""
_SPELLED = 64
"""Length of those that are compared with all routes, in half a millisecond."""


def path_hint(path: str, routes: Collection[str]) -> str:
    """What to request instead of an unknown path, or an empty string if that is not known.

    Args:
        routes: the paths of all routes.
    """
    path = path[:_CHARACTERS].rstrip("/")
    name = path.removeprefix("/v1") or "/"
    folder = name[: name.find("/", 1) + 1]
    if hint := _OTHERS.get(name) or _OTHERS.get(folder):
        return hint
    for start in (index for index, character in enumerate(path) if character == "/"):
        if (end := path[start:]) in routes:
            # The client's base URL ends with a route, or with another /v1.
            return f"use {'/v1' if f'/v1{end}' in routes else ''}{end}"
    similar = get_close_matches(path, routes, 1, 0.9) if len(path) <= _SPELLED else []
    return f"use {similar[0]}" if similar else ""
