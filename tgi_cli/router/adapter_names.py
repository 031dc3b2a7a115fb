"""Which LoRA adapter a request means: names that it may say, and those that mean the base."""

from __future__ import annotations

import asyncio
import time

from tgi_cli.errors import ShardError
from tgi_cli.hub.lora_files import BASE_NAME
from tgi_cli.router.adapter_restore import DynamicAdapters
from tgi_cli.router.http import errors
from tgi_cli.rpc.interface import Adapters, EngineClient

_TRUSTED_SECONDS = 5.0
"""How long a name is taken for loaded without asking: another router may have unloaded it."""
_ASK_SECONDS = 0.25
"""Between two questions to the engine, however many names are unknown."""


class AdapterNames:
    """The names that the engine behind this router knows. Used from the event loop alone."""

    def __init__(self, client: EngineClient, model_id: str, kept: DynamicAdapters) -> None:
        self.kept = kept
        self._client = client
        self._base = {"", BASE_NAME, model_id, client.info.model_id}
        self._asked = time.monotonic()
        self._asking = asyncio.Lock()

    @property
    def loaded(self) -> Adapters:
        """As last heard."""
        return self._client.adapters

    async def native(self, adapter_id: str | None) -> str:
        """The adapter of a native request, empty for the base. Raises ApiError: 422, or 503."""
        name = adapter_id or ""
        if name in self._base:
            return ""
        if not await self._is_loaded(name):
            raise errors.validation(self._unknown(f"`adapter_id` {name!r}"), "adapter_id")
        return name

    async def openai(self, model: str | None, adapter_id: str | None = None) -> str:
        """The adapter that a /v1 request names by ``model`` or TGI's ``adapter_id``, empty for the
        base.

        A server without adapters answers to any model, as TGI does. Raises ApiError: 404 or 503,
        422 for an adapter that is unknown or two that differ.
        """
        named = await self._of_model(model)
        if not adapter_id:
            return named
        asked = await self.native(adapter_id)
        if named and named != asked:
            raise errors.validation(
                f"`model` names the adapter {named!r}, and `adapter_id` another", "adapter_id"
            )
        return asked

    async def _of_model(self, model: str | None) -> str:
        name = model or ""
        if name in self._base or not self.loaded.max_loras:
            return ""
        if not await self._is_loaded(name):
            raise errors.no_model(self._unknown(f"The model `{name}`"))
        return name

    async def refresh(self, age: float = _ASK_SECONDS) -> None:
        """Ask the engine what is loaded, unless it was asked within ``age`` seconds."""
        async with self._asking:
            if time.monotonic() - self._asked <= age:
                return
            try:
                await self.kept.ask()
            except ShardError:
                return  # who needs the engine will find out what is wrong with it
            self._asked = time.monotonic()

    async def _is_loaded(self, name: str) -> bool:
        if not self.loaded.max_loras:
            return False
        await self.kept.settled(name)
        await self.refresh(_TRUSTED_SECONDS if name in self.loaded.names else _ASK_SECONDS)
        return name in self.loaded.names

    def _unknown(self, what: str) -> str:
        if not self.loaded.max_loras:
            return f"{what} is not known: this server has no adapters (see --lora-adapters)"
        names = ", ".join(sorted(self.loaded.names))
        return f"{what} does not exist; adapters: {names or 'none is loaded'}"
