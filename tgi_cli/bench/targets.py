"""Resolves an address to a target: a shard's socket, or a server with TGI's or OpenAI's routes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from tgi_cli.bench.events import BenchTarget
from tgi_cli.bench.metrics_scrape import client_options
from tgi_cli.bench.settings import RequestSettings, TokenCounter
from tgi_cli.bench.token_counter import LocalTokenCounter, ServerTokenCounter, TokenEstimator
from tgi_cli.errors import ConfigError, HubError, ModelError, RouterError, ShardError

_SECONDS = 10.0
_REFUSED = (401, 403)


@dataclass(frozen=True)
class ResolvedTarget:
    """A target that responds.

    Attributes:
        tokenizer: The tokenizer of its model, or an estimate (``exact`` False).
        notes: For ``BenchRun.notes``: how tokens are counted, if not by the tokenizer.
    """

    target: BenchTarget
    tokenizer: TokenCounter
    notes: list[str] = field(default_factory=list)


async def resolve_target(
    address: str,
    settings: RequestSettings,
    *,
    tokenizer_name: str = "",
    revision: str = "",
    started_here: list[str] | None = None,
) -> ResolvedTarget:
    """Resolve an address: a URL, or the path (also ``unix://...``) of a shard's socket.

    A URL may end in ``/v1``. The tokenizer is that of ``tokenizer_name`` (a folder or a model id),
    else that of the server's model, else the server's /tokenize, else an estimate, with a note.

    Raises:
        ConfigError: Invalid address, or a server with neither TGI's nor OpenAI's routes.
        RouterError: The URL cannot be reached, or the server rejects the key.
        ShardError: Nothing listens on the socket, or it does not speak generate.v3.
        HubError, ModelError: ``tokenizer_name`` is unavailable.
    """
    parts = urlsplit(address)
    if parts.scheme in ("http", "https") and parts.hostname:
        url = address.rstrip("/").removesuffix("/v1")
        target = await _server(url, settings)
    elif address.startswith("unix:") or "/" in address:
        url = ""
        target = await asyncio.to_thread(_shard, address, settings, tokenizer_name)
    else:
        raise ConfigError(
            f"{address!r} is neither a URL nor a socket", "write http://HOST:PORT, or a path"
        )
    if started_here:
        target = msgspec.structs.replace(target, started_here=started_here)
    notes: list[str] = []
    tokenizer = await asyncio.to_thread(
        _tokenizer, url, settings, target, tokenizer_name, revision, notes
    )
    return ResolvedTarget(target, tokenizer, notes)


# ------------------------------------------------------------------ servers


async def _server(url: str, settings: RequestSettings) -> BenchTarget:
    async with httpx.AsyncClient(**client_options(settings, _SECONDS)) as client:
        info = await _get_json(client, f"{url}/info")
        if isinstance(info, dict) and isinstance(info.get("model_id"), str):
            return BenchTarget(kind="tgi", address=url, model=info["model_id"], info=info)
        listed = await _get_json(client, f"{url}/v1/models")
    data = listed.get("data") if isinstance(listed, dict) else None
    models = [one for one in data or [] if isinstance(one, dict) and one.get("id")]
    if models:
        chosen = next((one for one in models if one["id"] == settings.model), models[0])
        return BenchTarget(kind="openai", address=url, model=str(chosen["id"]), info=chosen)
    if settings.model:  # it lists no models; its user knows one
        return BenchTarget(kind="openai", address=url, model=settings.model)
    raise ConfigError(
        f"{url} has neither TGI's /info nor OpenAI's /v1/models",
        "check the URL, or name the model of a server without these routes",
    )


async def _get_json(client: httpx.AsyncClient, url: str) -> Any:
    """The JSON of a route, or None if there is none. Raises RouterError."""
    try:
        response = await client.get(url)
    except httpx.HTTPError as error:
        why = str(error) or type(error).__name__
        raise RouterError(f"{url} cannot be reached: {why}", "see whether it runs") from error
    if response.status_code in _REFUSED:
        raise RouterError(
            f"{url} refuses the request with status {response.status_code}", "give its API key"
        )
    if response.status_code != 200:
        return None
    try:
        return response.json()
    except ValueError:
        return None


# ------------------------------------------------------------------ shards


def _shard(address: str, settings: RequestSettings, tokenizer_name: str) -> BenchTarget:
    from tgi_cli.bench.load.shard import ShardGroup
    from tgi_cli.rpc.client import fetch_info

    path = Path(address.removeprefix("unix:"))
    if str(path).startswith("//"):
        path = Path("/" + str(path).lstrip("/"))
    if not path.exists():
        beside = sorted(str(p) for p in path.parent.glob(f"{path.name}-*"))
        raise ShardError(
            f"there is no socket {path}",
            f"name one of {', '.join(beside)}" if beside else "see whether the server runs",
        )
    details = ShardGroup(str(path), settings.timeout, settings.connect_timeout).info
    names = ("dtype", "device_type", "attention_impl", "block_size", "speculate")
    info = {name: getattr(details, name) for name in names}
    model = tokenizer_name
    try:  # one of ours also knows its model
        own = fetch_info(f"unix:{path}", timeout=settings.connect_timeout)
    except ShardError:
        pass
    else:
        model = own.model_id
        info |= {"max_total_tokens": own.max_total_tokens, "device": own.device}
    if not model:
        raise ConfigError(
            f"the model of the shard on {path} is unknown",
            "name its tokenizer: --tokenizer-name MODEL",
        )
    return BenchTarget(kind="shard-v3", address=str(path), model=model, info=info)


# ------------------------------------------------------------------ tokens


def _tokenizer(
    url: str,
    settings: RequestSettings,
    target: BenchTarget,
    tokenizer_name: str,
    revision: str,
    notes: list[str],
) -> TokenCounter:
    if tokenizer_name:
        return _local(tokenizer_name, revision)
    try:
        return _local(target.model, revision)
    except (HubError, ModelError) as error:
        cause = error.cause
    if url:
        client = httpx.Client(**client_options(settings, _SECONDS))
        counter = ServerTokenCounter.find(url, client, settings.model or target.model)
        if counter is not None:
            notes.append(
                f"The tokenizer of {target.model} is unavailable ({cause}): {counter.name} "
                "counts tokens."
            )
            return counter
        client.close()
    notes.append(
        f"The tokenizer of {target.model} is unavailable ({cause}), and the server has no "
        "/tokenize: lengths of prompts are estimates. Name a tokenizer to have them exact."
    )
    return TokenEstimator()


def _local(name: str, revision: str) -> LocalTokenCounter:
    """The tokenizer of a folder, a model id or the bundled model. Raises HubError, ModelError."""
    from tgi_cli import demo
    from tgi_cli.hub.resolve import resolve_model

    if name == demo.MODEL_ID:
        return LocalTokenCounter.load(demo.model_path(), name)
    folder = Path(name).expanduser()
    if not (folder / "tokenizer.json").is_file():
        folder = resolve_model(name, revision=revision or None, weights=False).path
    return LocalTokenCounter.load(folder, name)
