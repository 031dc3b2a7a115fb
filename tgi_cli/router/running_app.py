"""The application together with what it needs: texts, the session with the engine, images."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette

from tgi_cli.errors import ConfigError
from tgi_cli.process.resident_memory import release_file_pages, trim_heap
from tgi_cli.router.app import create_app
from tgi_cli.router.config import RouterConfig
from tgi_cli.router.replicas.policy import CacheAwarePolicy
from tgi_cli.router.replicas.pool import EnginePool
from tgi_cli.rpc.client import GrpcEngineClient
from tgi_cli.text.bundle import TextBundle
from tgi_cli.vision.load import load_vision

_NO_ENGINE = "`tgi model-server MODEL` starts one, --engine-url names another address"


@asynccontextmanager
async def running_app(config: RouterConfig) -> AsyncIterator[Starlette]:
    """Wait for the engine and yield the application in front of it; close both at the end.

    Raises:
        ConfigError: An address is invalid, the engines serve different models, or traces cannot
            be sent.
        ModelError: The tokenizer or the chat template is missing or unreadable.
        ShardError: The TLS handshake with the engine fails.
    """
    release_file_pages()  # of what imports alone have run: they would add to the tokenizer's peak
    text = await asyncio.to_thread(
        TextBundle.load,
        config.model_path,
        config.trust_remote_code,
        chat_template=config.chat_template,
        tokenizer_config_path=config.tokenizer_config_path,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )
    trim_heap()  # of what reading the tokenizer took
    client = await _connect(config)
    try:
        vision = await asyncio.to_thread(
            load_vision, config.model_path, text.tokenizer, config.image_limits, client.info
        )
        app = create_app(client, text, config, vision)
        try:
            yield app
        finally:
            await app.state.router.close()
    finally:
        await client.close()


async def _connect(config: RouterConfig) -> GrpcEngineClient | EnginePool:
    """Wait for the engine, or for all of several.

    Raises:
        ConfigError: An address is invalid, or the engines serve different models.
        ShardError: See :meth:`GrpcEngineClient.connect`.
    """
    urls = (config.engine_url, *config.replica_url)
    hint = _NO_ENGINE if config.parent_fd is None else ""
    connect = partial(
        GrpcEngineClient.connect,
        stall_seconds=config.watchdog_timeout,
        tls=config.engine_tls,
        hint=hint,
    )
    connecting = [asyncio.ensure_future(connect(url, None)) for url in urls]
    try:
        clients = await asyncio.gather(*connecting)
    except BaseException:
        for each in connecting:
            each.cancel()
        raise
    if len(clients) == 1:
        return clients[0]
    models = {(client.info.model_id, client.info.vocab_size) for client in clients}
    if len(models) > 1:
        served = ", ".join(
            f"{client.info.model_id} at {url}" for client, url in zip(clients, urls, strict=True)
        )
        raise ConfigError(
            f"the replicas serve different models: {served}", "start all with the same MODEL"
        )
    return EnginePool(
        clients,
        CacheAwarePolicy(
            {replica: client.info.max_batch_total_tokens for replica, client in enumerate(clients)},
            cache_threshold=config.cache_threshold,
            balance_abs_threshold=config.balance_abs_threshold,
            balance_rel_threshold=config.balance_rel_threshold,
        ),
    )
