"""What the router does when the engine restarts: adopt its limits and load adapters again."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Protocol

from tgi_cli.engine.messages import EngineInfo
from tgi_cli.errors import ShardError
from tgi_cli.router.config import RouterConfig
from tgi_cli.router.generation.generator import Generator
from tgi_cli.router.http import errors
from tgi_cli.rpc.interface import GONE, AdapterError, AdapterFault, EngineClient

logger = logging.getLogger(__name__)

_MEASURED = {"load_seconds", "step_seconds", "weight_bytes"}
"""Fields that differ between two starts of the same model."""
_WAIT_SECONDS = 10.0
"""Longest wait of a request for its adapter to be loaded again."""
_RETRY_SECONDS = 1.0
"""Pause before loading an adapter again."""
_ATTEMPTS = 3
"""Attempts while the engine is connected but does not answer."""


class AdapterLoader(Protocol):
    """Loads adapters for clients, and restores them where an engine has restarted.

    :class:`DynamicAdapters` does for one engine,
    :class:`tgi_cli.router.replicas.adapters.ReplicaAdapters` for several.
    """

    async def load(self, name: str, source: str, in_place: bool) -> None: ...

    async def unload(self, name: str) -> None: ...

    async def refresh(self) -> None: ...

    async def settled(self, name: str) -> None: ...

    def restore(self, another: bool) -> None: ...

    def close(self) -> None: ...


class EngineRestart:
    """Adopts the limits of every new engine and restores its adapters.

    By the time an engine is found again, requests in flight have ended, and those that are being
    prepared are checked again (:meth:`tgi_cli.router.generation.generator.Generator.open`).
    """

    def __init__(
        self,
        client: EngineClient,
        config: RouterConfig,
        generator: Generator,
        adapters: AdapterLoader,
    ) -> None:
        self._client = client
        self._config = config
        self._generator = generator
        self._adapters = adapters
        self._info = client.info
        generator.take(bounded(self._info, config))
        client.on_found(self._found)

    def _found(self, another: bool) -> None:
        if another:
            self._adopt_limits()
        self._adapters.restore(another)

    def _adopt_limits(self) -> None:
        before, self._info = self._info, self._client.info
        changes = ", ".join(
            f"{field.name} {new} (was {old})"
            for field in fields(EngineInfo)
            if field.name not in _MEASURED
            and (new := getattr(self._info, field.name)) != (old := getattr(before, field.name))
        )
        if changes:
            logger.warning("the model server came back with %s", changes)
        if (before.model_id, before.vocab_size) != (self._info.model_id, self._info.vocab_size):
            logger.error("the router has the tokenizer of %s: start it anew", before.model_id)
        self._generator.take(bounded(self._info, self._config))


def bounded(info: EngineInfo, config: RouterConfig) -> EngineInfo:
    """The engine's info with its limits lowered to those of the configuration."""
    total = min(config.max_total_tokens or info.max_total_tokens, info.max_total_tokens)
    most = min(config.max_input_tokens or info.max_input_tokens, info.max_input_tokens)
    return replace(info, max_total_tokens=total, max_input_tokens=min(most, total - 1))


@dataclass(frozen=True, slots=True)
class _LoadedAdapter:
    """An adapter's folder on the engine's machine, and the source that the client named."""

    path: str
    source: str


class DynamicAdapters:
    """Adapters that clients loaded through this router, which it restores in a new engine.

    An adapter that another router unloads or replaces, as the engine's list shows, is forgotten.
    Use from the event loop only.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._loaded: dict[str, _LoadedAdapter] = {}
        self._returning: dict[str, asyncio.Event] = {}
        """Adapters that the engine lacks so far; set when one is restored or given up."""
        self._restoring: asyncio.Task[None] | None = None

    async def load(self, name: str, source: str, in_place: bool) -> None:
        """Load an adapter. Raises as :meth:`EngineClient.load_adapter` and :meth:`settled`."""
        await self.settled(name)
        await self._load(name, source, source, in_place)

    async def unload(self, name: str) -> None:
        """Unload an adapter. Raises as :meth:`EngineClient.unload_adapter` and :meth:`settled`."""
        await self.settled(name)
        try:
            await self._client.unload_adapter(name)
        except AdapterError as error:
            if error.fault is AdapterFault.UNKNOWN:
                self._loaded.pop(name, None)
            raise
        self._loaded.pop(name, None)

    def expect(self, name: str, other: DynamicAdapters) -> None:
        """Have an adapter that another engine has loaded; load it when this engine is found."""
        if (adapter := other._loaded.get(name)) is not None:
            self._loaded[name] = adapter
            if self._client.connected:
                self.restore(another=True)

    def forget(self, name: str) -> None:
        """Restore an adapter no more."""
        self._loaded.pop(name, None)

    def is_returning(self, name: str) -> bool:
        """Whether the engine lacks the adapter so far."""
        return name in self._returning

    async def refresh(self) -> None:
        """Have the client list what is loaded. Raises ShardError."""
        before = {name: one for name, one in self._loaded.items() if name not in self._returning}
        listed = {one.name: one.path for one in (await self._client.list_adapters()).loaded}
        for name, adapter in before.items():
            changed = listed.get(name) != adapter.path and name not in self._returning
            if changed and self._loaded.get(name) is adapter:
                del self._loaded[name]

    async def settled(self, name: str) -> None:
        """Wait while the adapter is being restored. Raises ApiError, 503, after ten seconds."""
        returning = self._returning.get(name)
        if returning is None:
            return
        if self._client.connected:
            with suppress(TimeoutError):
                async with asyncio.timeout(_WAIT_SECONDS):
                    await returning.wait()
            if name not in self._returning:
                return
        still = f"the adapter {name!r} is still being loaded again"
        raise errors.engine_gone(still if self._client.connected else GONE)

    def restore(self, another: bool) -> None:
        """Start loading what the engine lacks; from now on :meth:`settled` waits for that.

        Args:
            another: the engine was restarted. Otherwise it was only out of reach, and gets what
                was not restored before.
        """
        self.close()
        listed = {one.name: one.path for one in self._client.adapters.loaded}
        lacking = {
            name
            for name, adapter in self._loaded.items()
            if (another or name in self._returning) and listed.get(name) != adapter.path
        }
        for name in set(self._returning) - lacking:
            self._returning.pop(name).set()
        for name in lacking:
            self._returning.setdefault(name, asyncio.Event())
        if lacking:
            self._restoring = asyncio.create_task(self._restore(), name="adapters")

    def close(self) -> None:
        """Stop restoring."""
        if self._restoring is not None:
            self._restoring.cancel()

    async def _restore(self) -> None:
        for name, adapter in list(self._loaded.items()):
            if name not in self._returning:
                continue
            try:
                await self._load_again(name, adapter)
                logger.info("adapter %s: loaded again", name)
            except (AdapterError, ShardError) as error:
                if isinstance(error, ShardError) and not self._client.connected:
                    self._wake_waiting()
                    return  # until an engine is found
                del self._loaded[name]
                if isinstance(error, AdapterError) and error.fault is AdapterFault.TAKEN:
                    logger.info("adapter %s: another client has loaded one of this name", name)
                    with suppress(ShardError):
                        await self._client.list_adapters()
                else:
                    logger.warning("adapter %s: dropped, cannot be loaded again: %s", name, error)
            self._returning.pop(name).set()

    def _wake_waiting(self) -> None:
        """Have those that wait for adapters see that the engine is lost."""
        for name, returning in self._returning.items():
            returning.set()
            self._returning[name] = asyncio.Event()

    async def _load_again(self, name: str, adapter: _LoadedAdapter) -> None:
        """Load from its folder, or from its source if that is gone.

        Raises AdapterError or ShardError.
        """
        sources = [adapter.source] if adapter.source != adapter.path else []
        path, attempts = adapter.path, 1
        # It may have replaced an adapter of the command line, which the new engine has again.
        in_place = name in self._client.adapters.names
        while True:
            try:
                return await self._load(name, path, adapter.source, in_place)
            except AdapterError as error:
                if error.fault is AdapterFault.UNKNOWN and sources:
                    path = sources.pop()
                elif error.fault is AdapterFault.BUSY:
                    await asyncio.sleep(_RETRY_SECONDS)
                else:
                    raise
            except ShardError:
                if attempts == _ATTEMPTS:
                    raise
                attempts += 1
                await asyncio.sleep(_RETRY_SECONDS)
                if not self._client.connected:
                    raise

    async def _load(self, name: str, path: str, source: str, in_place: bool) -> None:
        answer = await self._client.load_adapter(name, path, in_place)
        for adapter in answer.loaded:
            if adapter.name == name:
                self._loaded[name] = _LoadedAdapter(adapter.path, source)
