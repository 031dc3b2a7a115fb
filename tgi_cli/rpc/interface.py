"""What the router sees of an engine, wherever it runs: submit, read tokens, cancel.

:class:`tgi_cli.rpc.client.GrpcEngineClient` implements it over the wire; tests implement it in
a few lines without one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from tgi_cli.engine.messages import (
    EngineInfo,
    Finished,
    GenerationRequest,
    Logits,
    PromptLogprobs,
    Started,
)
from tgi_cli.engine.metrics import EngineMetrics
from tgi_cli.errors import ModelError

GONE = "the model server is gone"
"""Why a request ends, or cannot begin, where there is no engine."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that requests may name; ``path`` is its folder where the engine runs."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Adapters:
    """What is loaded, in order; so many different ones share a batch (0: none can be loaded)."""

    max_loras: int = 0
    loaded: tuple[Adapter, ...] = ()

    @property
    def names(self) -> list[str]:
        return [adapter.name for adapter in self.loaded]


class AdapterFault(Enum):
    """Why an adapter could not be loaded or unloaded."""

    UNUSABLE = "unusable"
    """Its name, its files, or what they say."""
    TAKEN = "taken"
    """One of this name is loaded."""
    UNKNOWN = "unknown"
    """None of this name is loaded, or there is nothing where it is said to be."""
    OFF = "off"
    """The engine takes none."""
    BUSY = "busy"
    """Too many are being loaded at this moment."""


class AdapterError(ModelError):
    """An adapter could not be loaded or unloaded; ``fault`` says of which kind the cause is."""

    def __init__(
        self, cause: str, remedy: str = "", fault: AdapterFault = AdapterFault.UNUSABLE
    ) -> None:
        super().__init__(cause, remedy)
        self.fault = fault


@dataclass(slots=True)
class TokenBatch:
    """What became known of one request since the last batch: tokens in order, or its end.

    Parallel arrays over tokens, as in :class:`tgi_cli.engine.messages.StepOutputs`. ``started``
    comes once, with or before the first token; ``finished`` comes once, last.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    started: Started | None = None
    finished: Finished | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    """Runs of the prompt's, in order, before the first token; empty unless asked for."""
    logits: tuple[Logits, ...] = ()
    """Raw logits, if requested; in the engine's own process only."""


class TokenStream(Protocol):
    """The tokens of one submitted request; ends after the batch that carries ``finished``."""

    def __aiter__(self) -> AsyncIterator[TokenBatch]: ...

    def cancel(self) -> None:
        """Stop the request at the engine's next step. Idempotent; nothing more is delivered."""
        ...


class EngineClient(Protocol):
    """One connection to one engine."""

    @property
    def info(self) -> EngineInfo:
        """The engine's model and effective limits."""
        ...

    @property
    def connected(self) -> bool:
        """False once the engine is gone: live streams have ended with an ERROR."""
        ...

    def on_found(self, heard: Callable[[bool], None]) -> None:
        """Have ``heard`` called whenever the engine is found after a loss.

        With whether it is another one: True after it was started again, False when it was only
        out of reach. In the event loop, when :attr:`info` and :attr:`adapters` are its own
        already, and before it is :attr:`connected`.
        """
        ...

    async def healthy(self) -> bool:
        """Ask the engine; False when it is gone, or stands still while requests wait."""
        ...

    async def metrics(self) -> EngineMetrics:
        """The engine's metrics; those fetched last if it does not answer."""
        ...

    def submit(self, request: GenerationRequest, adapter: str = "") -> TokenStream:
        """Queue a request; ``adapter`` names the loaded one to use, empty: the base model.

        The request's own ``adapter_id`` is not looked at: those are the engine's.

        Raises:
            ShardError: the engine is gone.
            ValueError: it asks for what does not leave the engine's process.
        """
        ...

    @property
    def adapters(self) -> Adapters:
        """What is loaded, as last heard: other clients may have changed it since."""
        ...

    async def list_adapters(self) -> Adapters:
        """Ask the engine what is loaded. Raises ShardError."""
        ...

    async def load_adapter(self, name: str, source: str, in_place: bool = False) -> Adapters:
        """Load an adapter; returns when requests may name it.

        Args:
            name: for requests to use.
            source: an absolute path on the engine's machine, or a hub's ``id`` or
                ``id@revision``.
            in_place: take the place of one that has the name.

        Raises:
            AdapterError: it cannot be.
            ShardError: the engine is gone.
        """
        ...

    async def unload_adapter(self, name: str) -> Adapters:
        """Refuse new requests for an adapter; live ones run to their end.

        Raises:
            AdapterError: it cannot be.
            ShardError: the engine is gone.
        """
        ...

    def next_request_id(self) -> int:
        """An id that no live request of this client has."""
        ...
