"""What the router sees of an engine, wherever it runs: submit, read tokens, cancel.

:class:`tgi_cli.rpc.client.GrpcEngineClient` implements it over the wire; tests implement it in
a few lines without one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from tgi_cli.engine.messages import (
    EngineInfo,
    Finished,
    GenerationRequest,
    PromptLogprobs,
    Started,
)


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


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine after its latest step; what is counted, is counted since its start.

    Attributes:
        queued, running: requests.
        used_blocks: of the KV cache, held by requests.
        preemptions: counted.
        reused_tokens: prompt tokens that were found in the prefix cache; counted.
        prompt_tokens: of all requests that started; counted.
        cached_blocks: of the KV cache, used or free, whose content can be found by a prefix.
        steps: counted.
        context_tokens: prompt tokens that were computed, those that preemption lost included;
            counted.
    """

    queued: int = 0
    running: int = 0
    used_blocks: int = 0
    preemptions: int = 0
    reused_tokens: int = 0
    prompt_tokens: int = 0
    cached_blocks: int = 0
    steps: int = 0
    context_tokens: int = 0


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
    def load(self) -> EngineLoad:
        """As of the latest step message."""
        ...

    @property
    def connected(self) -> bool:
        """False once the engine is gone: live streams have ended with an ERROR."""
        ...

    async def healthy(self) -> bool:
        """Ask the engine; False when it is gone, or stands still while requests wait."""
        ...

    def submit(self, request: GenerationRequest) -> TokenStream:
        """Queue a request.

        Raises:
            ShardError: the engine is gone.
            ValueError: it asks for what does not leave the engine's process.
        """
        ...

    def next_request_id(self) -> int:
        """An id that no live request of this client has."""
        ...
