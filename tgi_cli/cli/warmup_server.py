"""`tgi warmup --url`: prompts of all sizes for a running server, over TGI's own routes."""

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
"""Of prompts; the longest that the server takes comes last."""
BATCHES = (1, 2, 4, 8, 16, 32)
"""Requests at once."""
PROMPT, NEW = 128, 32
"""Tokens of a request of a batch, in and out."""
_SECONDS = 600.0


class ServerError(TgiError):
    """The server does not do what it is asked for."""

    exit_code = ExitCode.FAILURE


def warm_server(
    url: str,
    api_key: str | None,
    batch_sizes: Sequence[int] | None = None,
    say: Callable[[str], object] = lambda words: None,
) -> dict[str, Any]:
    """Send prompts of several lengths, then several requests at once, and wait for all.

    Args:
        url: of a server that has TGI's routes: ours, or TGI.
        api_key: that it asks for, if it does; of several, the first.
        batch_sizes: requests at once; those beyond what the server takes at once are left out.
        say: told what is being done.

    Raises:
        ConfigError: ``url`` is none.
        ServerError: nobody answers there, or not as TGI does.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url!r} is no address of a server", "give http://HOST:PORT")
    return asyncio.run(_warm(url.rstrip("/"), api_key, batch_sizes or BATCHES, say))


async def _warm(
    url: str, api_key: str | None, sizes: Sequence[int], say: Callable[[str], object]
) -> dict[str, Any]:
    import httpx

    headers = {} if api_key is None else {"authorization": f"Bearer {api_key.partition(',')[0]}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=_SECONDS, limits=limits
    ) as client:
        info = await _ask(client, "GET", "/info")
        try:
            longest, total = int(info["max_input_tokens"]), int(info["max_total_tokens"])
            at_once = int(info["max_concurrent_requests"])
        except (KeyError, TypeError, ValueError) as error:
            raise _no_tgi(url, "its /info tells no limits") from error
        prefill = []
        for length in [*(each for each in LENGTHS if each < longest), longest]:
            say(f"a prompt of {length} tokens")
            began = time.monotonic()
            await _generate(client, length, min(2, total - length))
            prefill.append({"tokens": length, "seconds": time.monotonic() - began})
        batches = []
        prompt = max(1, min(PROMPT, longest, total - 1))
        new = min(NEW, total - prompt)
        for size in [each for each in sizes if each <= at_once]:
            say(f"{size} requests at once")
            began = time.monotonic()
            told = await asyncio.gather(*(_generate(client, prompt, new) for _ in range(size)))
            seconds = time.monotonic() - began
            batches.append(
                {
                    "batch_size": size,
                    "seconds": seconds,
                    "tokens": sum(told),
                    "tokens_per_second": sum(told) / seconds,
                }
            )
    return {"url": url, "model": info.get("model_id", ""), "prefill": prefill, "batches": batches}


async def _generate(client: httpx.AsyncClient, length: int, new: int) -> int:
    """Tokens that one request got; its prompt is of ``length`` tokens that no cache has."""
    words = " ".join(str(random.randrange(10**6)) for _ in range(length))  # a token each at least
    parameters = {"truncate": length, "max_new_tokens": new, "details": True}
    body = {"inputs": words, "parameters": parameters}
    answer = await _ask(client, "POST", "/generate", body)
    try:
        return int(answer["details"]["generated_tokens"])
    except (KeyError, TypeError) as error:
        raise _no_tgi(str(client.base_url), "its /generate tells no details") from error


async def _ask(client: httpx.AsyncClient, method: str, path: str, body: Any = None) -> Any:
    import httpx

    url = str(client.base_url).rstrip("/")
    try:
        response = await client.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise ServerError(
            f"{url} does not answer: {error or type(error).__name__}", "is a server running there?"
        ) from error
    if response.status_code in (401, 403):
        raise ServerError(f"{url} asks for another API key", "give it with --api-key or API_KEY")
    if response.status_code != 200:
        cause = response.text.strip()[:200]
        raise ServerError(f"{url}{path} answers {response.status_code}: {cause}")
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise _no_tgi(url, f"its {path} answers no JSON object")
    return answer


def _no_tgi(url: str, why: str) -> ServerError:
    return ServerError(f"{url} is no server of TGI's kind: {why}", "see its address")
