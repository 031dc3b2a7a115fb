"""The names of LoRA adapters, and those that mean the base model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

from tgi_cli.config.model_names import BASE_NAME
from tgi_cli.errors import ShardError
from tgi_cli.router.engine_restart import AdapterLoader
from tgi_cli.router.http import errors
from tgi_cli.rpc.interface import Adapters, EngineClient

_TRUSTED_SECONDS = 5.0
"""How long a listed adapter counts as loaded: another router may unload it."""
_REFRESH_SECONDS = 0.25
"""Shortest time between two lists, however many names are unknown."""


class AdapterNames:
    """Resolves the names that requests give adapters. Use from the event loop only.

    Args:
        served: Names of the base model in ``model``. Default: its id, and any name that is no
            adapter's if there can be no adapters.
    """

    def __init__(
        self,
        client: EngineClient,
        model_id: str,
        dynamic: AdapterLoader,
        served: Sequence[str] = (),
    ) -> None:
        self.dynamic = dynamic
        self._client = client
        self._base = {"", BASE_NAME, model_id, client.info.model_id}
        self._served = served
        self._served_base = {"", BASE_NAME, *served} if served else self._base
        self._refreshed = time.monotonic()
        self._refreshing = asyncio.Lock()

    @property
    def loaded(self) -> Adapters:
        """The adapters of the latest list."""
        return self._client.adapters

    async def for_tgi(self, adapter_id: str | None) -> str:
        """The adapter of a TGI request, empty for the base. Raises ApiError: 422 or 503."""
        name = adapter_id or ""
        if name in self._base:
            return ""
        if not await self._is_loaded(name):
            raise errors.validation(self._unknown(f"`adapter_id` {name!r}"), "adapter_id")
        return name

    async def for_openai(self, model: str | None, adapter_id: str | None = None) -> str:
        """The adapter that a /v1 request names by ``model`` or TGI's ``adapter_id``.

        Empty for the base. A server without adapters accepts any model, as TGI does, unless its
        model has names of its own. Raises
        ApiError: 404 or 503, and 422 for an unknown adapter or two that differ.
        """
        named = await self._of_model(model)
        if not adapter_id:
            return named
        adapter = await self.for_tgi(adapter_id)
        if named and named != adapter:
            raise errors.validation(
                f"`model` names the adapter {named!r}, and `adapter_id` another", "adapter_id"
            )
        return adapter

    async def _of_model(self, model: str | None) -> str:
        name = model or ""
        if name in self._served_base or not (self.loaded.max_loras or self._served):
            return ""
        if not await self._is_loaded(name):
            if self._served:
                names = ", ".join([*self._served, *sorted(self.loaded.names)])
                raise errors.no_model(f"The model `{name}` does not exist; served: {names}")
            raise errors.no_model(self._unknown(f"The model `{name}`"))
        return name

    async def refresh(self, age: float = _REFRESH_SECONDS) -> None:
        """List what is loaded, unless the latest list is at most ``age`` seconds old."""
        async with self._refreshing:
            if time.monotonic() - self._refreshed <= age:
                return
            with suppress(ShardError):  # which generating raises with its cause
                await self.dynamic.refresh()
                self._refreshed = time.monotonic()

    async def _is_loaded(self, name: str) -> bool:
        if not self.loaded.max_loras:
            return False
        await self.dynamic.settled(name)
        await self.refresh(_TRUSTED_SECONDS if name in self.loaded.names else _REFRESH_SECONDS)
        return name in self.loaded.names

    def _unknown(self, what: str) -> str:
        if not self.loaded.max_loras:
            return f"{what} is not known: this server has no adapters (see --lora-adapters)"
        names = ", ".join(sorted(self.loaded.names))
        return f"{what} does not exist; adapters: {names or 'none is loaded'}"
