"""One replica: the router's application in Ray's process, and a model server as its child. The
model server has the last pipeline stage; actors of the replica run the others.

A replica that is killed takes its model server along, which watches a pipe. A model server that
dies is restarted within the replica; meanwhile the replica refuses requests, and the application in
front asks another one. If it dies too often, the replica ends, and Ray starts another one.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ray import serve
from ray.util import get_node_ip_address

from tgi_cli import logging as logs
from tgi_cli.config import ServeConfig
from tgi_cli.errors import TgiError
from tgi_cli.launcher.model_server import ModelServerParts
from tgi_cli.launcher.start import start_model_server
from tgi_cli.model_server.config import ModelServerConfig
from tgi_cli.process import bind
from tgi_cli.process.cores import usable_cores
from tgi_cli.process.parent_death import parent_pipe
from tgi_cli.process.runtime_dir import SOCKET, VARIABLE, runtime_folder, write_secret
from tgi_cli.ray_serve.asgi_exchange import exchange, whole_response
from tgi_cli.ray_serve.autoscaling import KV_USAGE
from tgi_cli.ray_serve.config import Bundle
from tgi_cli.ray_serve.messages import ForwardedRequest, Refusal, ResponseStart, WholeResponse
from tgi_cli.ray_serve.prefix_router import KV_TOKENS, SERVING
from tgi_cli.ray_serve.replica_server import ReplicaServer
from tgi_cli.ray_serve.stage_nodes import StageNodeConfig, StageNodes, thread_variables
from tgi_cli.router.config import RouterConfig

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from tgi_cli.rpc.client import GrpcEngineClient

log = logging.getLogger(__name__)

_LAST_SECONDS = 1.0
"""Time for the last parts of answers before a replica that has failed ends."""
_ROUTER = "tgi_cli.router.running_app"
"""Imported beside the model server's start, which would wait for it otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReplicaConfig:
    """What a replica serves.

    Attributes:
        serve: Of the model server; the model need not be on this machine yet.
        router: Of the application, but for the model and the engine's address.
        bundle: Ray's resources of each stage of the replica.
        highest: Most replicas that there may be.
        locate: Finds or downloads the model and its adapters; see
            :func:`tgi_cli.launcher.serve.serve`.
    """

    serve: ServeConfig
    router: RouterConfig
    bundle: Bundle
    highest: int
    locate: Callable[[ServeConfig], tuple[ServeConfig, Path]]


class EngineReplica:
    """The class of Ray's deployment. Ray calls its methods on one event loop.

    Raises:
        TgiError: The model is unavailable, or the model server cannot serve it.
    """

    async def __init__(self, config: EngineReplicaConfig) -> None:  # type: ignore[misc]
        logs.setup("replica", config.router.logger_level, config.router.json_output)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._stack = AsyncExitStack()
        self._failed: asyncio.Future[TgiError] = asyncio.get_running_loop().create_future()
        self._serving = False
        began = time.monotonic()
        try:
            self._app = await self._open(config)
        except BaseException:
            await self._stack.aclose()
            raise
        # Of one engine.
        self._client: GrpcEngineClient = self._app.state.router.client
        self._serving = True
        self._failed.add_done_callback(self._end)
        log.info("replica %s: ready in %.1f s", self._name, time.monotonic() - began)

    async def _open(self, config: EngineReplicaConfig) -> Starlette:
        """Start the model server, and the application when it serves. Raises TgiError."""
        # Importing transformers for a download in this thread would stop Ray's health checks.
        found, path = await asyncio.to_thread(config.locate, config.serve)
        folder = self._stack.enter_context(runtime_folder())
        parent_fd = self._stack.enter_context(parent_pipe())
        router = replace(
            config.router,
            model_path=path,
            model_id=found.model_id,
            revision=found.revision or "",
            engine_url=f"unix:{folder / SOCKET}",
            parent_fd=parent_fd,
            response_store_bytes=0,  # the next request may reach another replica
        )
        loop = asyncio.get_running_loop()

        def on_failure(error: TgiError) -> None:
            loop.call_soon_threadsafe(self._fail, error)

        found = replace(found, replicas=_replicas_here(config))
        if config.bundle.stages > 1:
            found = self._place_stages(config, found, folder, on_failure)
        server_config = ModelServerConfig(
            serve=found,
            model_path=path,
            uds_path=folder / SOCKET,
            parent_fd=parent_fd,
        )
        variables = {VARIABLE: str(folder), **thread_variables(config.serve, config.bundle)}
        parts = ModelServerParts(
            start=partial(start_model_server, server_config, variables), usable=self._is_usable
        )
        server = ReplicaServer(parts, found, on_failure)
        self._stack.push_async_callback(asyncio.to_thread, server.stop)
        server.start()
        running_app = (await asyncio.to_thread(importlib.import_module, _ROUTER)).running_app
        opening = asyncio.ensure_future(self._stack.enter_async_context(running_app(router)))
        self._failed.add_done_callback(lambda _: opening.cancel())
        try:
            app: Starlette = await opening
            return app
        except asyncio.CancelledError:
            if self._failed.done():
                raise self._failed.result() from None
            raise

    def _place_stages(
        self,
        config: EngineReplicaConfig,
        found: ServeConfig,
        folder: Path,
        on_failure: Callable[[TgiError], None],
    ) -> ServeConfig:
        """Start the other stages on their nodes; returns the settings of the model server.

        Raises:
            TgiError: No port can be bound for them.
        """
        address = get_node_ip_address()
        # Each model server of this replica listens on it while it starts.
        reserved = self._stack.enter_context(bind.bind(address, 0, "Ray's address"))
        secret = secrets.token_hex(32)
        file = write_secret(folder, secret)
        common = {
            "nnodes": config.bundle.stages,
            "master_addr": address,
            "master_port": reserved.getsockname()[1],
            "replicas": found.replicas,
        }
        nodes = StageNodes(
            StageNodeConfig(
                serve=replace(config.serve, **common),
                secret=secret,
                bundle=config.bundle,
                locate=config.locate,
            ),
            on_failure,
        )
        self._stack.callback(nodes.close)
        return replace(found, **common, node_secret_file=file)

    # ------------------------------------------------------------------ requests

    async def respond(
        self, request: ForwardedRequest
    ) -> AsyncIterator[ResponseStart | Refusal | bytes]:
        """Yield the parts of an answer, or refuse the request."""
        if not (self._client.accepting or request.last_attempt):
            yield Refusal(self._name)
            return
        async for part in exchange(self._app, request):
            yield part

    async def respond_whole(self, request: ForwardedRequest) -> WholeResponse:
        """Return a complete answer, for requests that all replicas get."""
        return await whole_response(self._app, request, self._name)

    # ------------------------------------------------------------------ what Ray asks

    async def check_health(self) -> None:
        """Raise the error of a model server that will not be started again."""
        if self._failed.done():
            raise self._failed.result()

    async def record_routing_stats(self) -> dict[str, bool]:
        """What :class:`tgi_cli.ray_serve.prefix_router.PrefixRouter` chooses by."""
        return {SERVING: self._client.accepting}

    async def record_replica_metadata(self) -> dict[str, int]:
        """What it knows of a replica from the start."""
        return {KV_TOKENS: self._client.info.max_batch_total_tokens}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What :class:`tgi_cli.ray_serve.autoscaling.LoadPolicy` scales on."""
        info, load = self._client.info, (await self._client.metrics()).load
        return {KV_USAGE: load.used_blocks * info.block_size / info.max_batch_total_tokens}

    async def __del__(self) -> None:
        """Ray calls it when the replica has no requests and is to end."""
        if hasattr(self, "_stack"):
            await self._stack.aclose()

    # ------------------------------------------------------------------ the model server

    def _is_usable(self) -> bool:
        return self._serving and self._client.accepting

    def _fail(self, error: TgiError) -> None:
        if not self._failed.done():
            self._failed.set_result(error)

    def _end(self, failed: asyncio.Future[TgiError]) -> None:
        """End this process, so that Ray starts another replica without waiting for its checks."""
        if failed.cancelled():
            return
        error = failed.result()
        log.error("replica %s: %s; ending it", self._name, error)
        asyncio.get_running_loop().call_later(_LAST_SECONDS, os._exit, int(error.exit_code))


def _replicas_here(config: EngineReplicaConfig) -> int:
    """How many replicas may be on this machine, for their shares of its memory."""
    if config.bundle.gpus:
        return 1
    return min(config.highest, max(1, len(usable_cores()) // config.bundle.cpus))
