"""``tgi connect``: the settings that make a client use a server."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any
from urllib.parse import urlsplit

from tgi_cli.cli.client_files import FORMATS
from tgi_cli.cli.client_files.write import merge_into
from tgi_cli.cli.client_settings import CLIENTS, Server, file_of
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.cli.settings_flags import takes
from tgi_cli.cli.warmup_server import ServerError, ask_server
from tgi_cli.config.settings.setting import CONNECT
from tgi_cli.errors import ConfigError

_SECONDS = 30.0
_WINDOW_FIELDS = ("context_length", "max_model_len", "max_input_tokens")


@takes(
    CONNECT,
    ("tgi connect codex", "print Codex's settings"),
    ("tgi connect claude http://gpu:3000 --write", "into its file"),
)
def connect(settings: ParsedSettings) -> None:
    """Print or write the settings of a client, such as Codex.

    With them, the client uses the server at URL.

    The model's name and context length are the server's. The settings name the environment
    variable that holds the API key; they contain the key only if --api-key gives it.
    """
    client = CLIENTS[settings["client"]]
    server = asyncio.run(_find(settings))
    file_format, new = FORMATS[client.format], client.settings(server)
    path = settings["file"] or file_of(client)
    if settings["write"]:
        backup = merge_into(path, file_format, new, client.defaults)
        kept = f"; the file before it is {backup}" if backup else ""
        print(f"{path} has the settings for {server.model}{kept}", file=sys.stderr)
    else:
        print(file_format.dump({**client.defaults, **new}), end="")
        print(f"\nMerge this into {path}, or use --write.", file=sys.stderr)
    variable = server.key_variable if not server.api_key else ""
    if variable and not os.environ.get(variable):
        print(f"Set {variable} to the API key.", file=sys.stderr)
    if client.note:
        print(f"{client.note}.", file=sys.stderr)
    print(f"Start: {client.start}", file=sys.stderr)


async def _find(settings: ParsedSettings) -> Server:
    """Ask the server for its model and context length.

    Raises:
        ConfigError: the URL is invalid, or the server has no such model.
        ServerError: the server is unavailable, or does not report its context length.
    """
    import httpx

    url = settings["url"].rstrip("/").removesuffix("/v1").rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{settings['url']!r} is not the URL of a server", "give http://HOST:PORT"
        )
    variable = settings["api_key_env"]
    key = settings["api_key"] or os.environ.get(variable, "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    named = f"{variable}, or --api-key"
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=_SECONDS) as client:
        models = await ask_server(client, "GET", "/v1/models", key=named)
        cards = [card for card in models.get("data") or [] if isinstance(card, dict)]
        names = [card["id"] for card in cards if isinstance(card.get("id"), str)]
        if not names:
            raise ServerError(f"{url} lists no models", "check the URL")
        model = settings["model"] or names[0]
        if model not in names:
            raise ConfigError(f"{url} has no model {model!r}", f"it has: {', '.join(names)}")
        card = cards[names.index(model)]
        window = next((found for name in _WINDOW_FIELDS if (found := _count(card.get(name)))), 0)
        if not window:
            info = await ask_server(client, "GET", "/info", key=named)
            window = _count(info.get("max_total_tokens"))
    if not window:
        raise ServerError(f"{url} does not tell the context length of {model}")
    given = settings["api_key"] or ""
    needs_key = bool(key) or settings.is_set("api_key_env")
    return Server(url, model, window, variable if needs_key else "", given)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
