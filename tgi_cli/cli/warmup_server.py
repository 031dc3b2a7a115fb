"""`tgi warmup --url`: sends prompts of all sizes to a running server, over TGI's routes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tgi_cli.errors import ConfigError, ExitCode, TgiError

if TYPE_CHECKING:
    import httpx

LENGTHS = (128, 512, 1024, 2048, 4096, 8192)
"""Prompt lengths in tokens; the server's maximum is added."""
BATCHES = (1, 2, 4, 8, 16, 32)
"""Concurrent requests."""
PROMPT, NEW = 128, 32
"""Prompt and generated tokens per request of a batch."""
_SECONDS = 600.0


class ServerError(TgiError):
    """The server is unavailable, or not one of TGI's kind."""

    exit_code = ExitCode.FAILURE


def warm_server(
    url: str,
    api_key: str | None,
    batch_sizes: Sequence[int] | None = None,
    report: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Send prompts of several lengths, then several requests at once, and wait for all.

    Args:
        url: a server with TGI's routes.
        api_key: comma-separated API keys, of which the first is sent.
        batch_sizes: concurrent requests; those beyond the server's limit are omitted.
        report: called with a description of each step.

    Raises:
        ConfigError: ``url`` is not a URL.
        ServerError: the server is unavailable, or not one of TGI's kind.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url!r} is not the URL of a server", "give http://HOST:PORT")
    return asyncio.run(_warm(url.rstrip("/"), api_key, batch_sizes or BATCHES, report))


async def _warm(
    url: str, api_key: str | None, sizes: Sequence[int], report: Callable[[str], object]
) -> dict[str, Any]:
    import httpx

    headers = {} if api_key is None else {"authorization": f"Bearer {api_key.partition(',')[0]}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=_SECONDS, limits=limits
    ) as client:
        info = await ask_server(client, "GET", "/info")
        try:
            longest, total = int(info["max_input_tokens"]), int(info["max_total_tokens"])
            concurrency = int(info["max_concurrent_requests"])
        except (KeyError, TypeError, ValueError) as error:
            raise _not_tgi(url, "its /info has no limits") from error
        prefill = []
        for length in [*(each for each in LENGTHS if each < longest), longest]:
            report(f"a prompt of {length} tokens")
            began = time.monotonic()
            await _generate(client, length, min(2, total - length))
            prefill.append({"tokens": length, "seconds": time.monotonic() - began})
        batches = []
        prompt = max(1, min(PROMPT, longest, total - 1))
        new = min(NEW, total - prompt)
        for size in [each for each in sizes if each <= concurrency]:
            report(f"{size} requests at once")
            began = time.monotonic()
            generated = await asyncio.gather(*(_generate(client, prompt, new) for _ in range(size)))
            seconds = time.monotonic() - began
            batches.append(
                {
                    "batch_size": size,
                    "seconds": seconds,
                    "tokens": sum(generated),
                    "tokens_per_second": sum(generated) / seconds,
                }
            )
    return {"url": url, "model": info.get("model_id", ""), "prefill": prefill, "batches": batches}


async def _generate(client: httpx.AsyncClient, length: int, new: int) -> int:
    """Send a request of ``length`` random tokens; returns the number of generated tokens."""
    words = " ".join(str(random.randrange(10**6)) for _ in range(length))  # at least a token each
    parameters = {"truncate": length, "max_new_tokens": new, "details": True}
    body = {"inputs": words, "parameters": parameters}
    answer = await ask_server(client, "POST", "/generate", body)
    try:
        return int(answer["details"]["generated_tokens"])
    except (KeyError, TypeError) as error:
        raise _not_tgi(str(client.base_url), "its /generate has no details") from error


async def ask_server(
    client: httpx.AsyncClient,
    method: str,
    path: str,
    body: Any = None,
    *,
    key: str = "--api-key or API_KEY",
) -> dict[str, Any]:
    """Send a request and return the JSON object that answers it; ``key`` names the settings of the
    API key. Raises ServerError."""
    import httpx

    url = str(client.base_url).rstrip("/")
    try:
        response = await client.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise ServerError(
            f"{url} is unavailable: {error or type(error).__name__}", "is a server running there?"
        ) from error
    if response.status_code in (401, 403):
        raise ServerError(f"{url} rejects the API key", f"set {key}")
    if response.status_code != 200:
        cause = response.text.strip()[:200]
        raise ServerError(f"{url}{path} returned status {response.status_code}: {cause}")
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise _not_tgi(url, f"its {path} does not return a JSON object")
    return answer


def _not_tgi(url: str, reason: str) -> ServerError:
    return ServerError(f"{url} is not a server of TGI's kind: {reason}", "check the URL")
