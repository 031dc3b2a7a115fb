"""The router's interface to an engine: submit, read tokens, cancel.

:class:`tgi_cli.rpc.client.GrpcEngineClient` implements it over the wire, tests without one.
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
    VerifiedDrafts,
)
from tgi_cli.engine.metrics import EngineMetrics
from tgi_cli.errors import ModelError

GONE = "the model server is gone"
"""Error of requests without an engine."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that requests may name; ``path`` is its folder where the engine runs."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Adapters:
    """The loaded adapters, in order; ``max_loras`` of them can share a batch (0 for none)."""

    max_loras: int = 0
    loaded: tuple[Adapter, ...] = ()

    @property
    def names(self) -> list[str]:
        return [adapter.name for adapter in self.loaded]


class AdapterFault(Enum):
    """Why an adapter could not be loaded or unloaded."""

    UNUSABLE = "unusable"
    """Its name or its files are invalid."""
    TAKEN = "taken"
    """An adapter of this name is loaded."""
    UNKNOWN = "unknown"
    """No adapter of this name is loaded, or its source does not exist."""
    OFF = "off"
    """The engine takes no adapters."""
    BUSY = "busy"
    """Too many adapters are being loaded."""


class AdapterError(ModelError):
    """An adapter could not be loaded or unloaded; ``fault`` is the kind of the cause."""

    def __init__(
        self, cause: str, remedy: str = "", fault: AdapterFault = AdapterFault.UNUSABLE
    ) -> None:
        super().__init__(cause, remedy)
        self.fault = fault


@dataclass(slots=True)
class TokenBatch:
    """The new tokens of one request since the last batch, in order, or its end.

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
    """Of the prompt's tokens, before the first generated one; empty unless requested."""
    drafts: tuple[VerifiedDrafts, ...] = ()
    """One for each step that verified drafts, in order; the batch has the tokens of these steps."""
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

    def on_found(self, callback: Callable[[bool], None]) -> None:
        """Call ``callback`` in the event loop whenever the engine is found after a loss.

        Its argument is True if the engine was restarted, False if it was only unreachable.
        :attr:`info` and :attr:`adapters` are up to date by then; it is not yet :attr:`connected`.
        """
        ...

    def expect_loss(self) -> None:
        """The engine is about to be stopped on purpose: its loss is no error."""
        ...

    async def healthy(self) -> bool:
        """Ask the engine; False if it is gone, or makes no progress while requests wait."""
        ...

    async def metrics(self) -> EngineMetrics:
        """The engine's metrics; those fetched last if it does not answer."""
        ...

    def submit(
        self, request: GenerationRequest, adapter: str = "", session: str = ""
    ) -> TokenStream:
        """Queue a request for a loaded adapter, or for the base model if ``adapter`` is empty.

        The request's ``adapter_id`` is ignored: those ids are the engine's. ``session`` names the
        conversation that it belongs to, if that is known: a hint where several engines share the
        requests.

        Raises:
            ShardError: The engine is gone.
            ValueError: The request needs the engine's own process.
        """
        ...

    @property
    def adapters(self) -> Adapters:
        """The loaded adapters as of the last answer; other clients may have changed them since."""
        ...

    async def list_adapters(self) -> Adapters:
        """Fetch the loaded adapters. Raises ShardError."""
        ...

    async def load_adapter(self, name: str, source: str, in_place: bool = False) -> Adapters:
        """Load an adapter; returns when requests may name it.

        Args:
            name: For requests to use.
            source: An absolute path on the engine's machine, or a hub's ``id`` or
                ``id@revision``.
            in_place: Replace an adapter of the same name.

        Raises:
            AdapterError: It cannot be loaded.
            ShardError: The engine is gone.
        """
        ...

    async def unload_adapter(self, name: str) -> Adapters:
        """Refuse new requests for an adapter; live ones run to their end.

        Raises:
            AdapterError: It cannot be unloaded.
            ShardError: The engine is gone.
        """
        ...

    def next_request_id(self) -> int:
        """Return an id that no live request of this client has."""
        ...
