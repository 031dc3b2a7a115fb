"""One log line for each request: what it asked of the server and what it got, never its text.

A request has a record from its first byte to its last; whoever serves it finds the record
through :func:`record` and adds to it. Errors are logged by their kind: their words may repeat
what the client has sent.
"""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar
from typing import Any, Protocol

from tgi_cli.engine.messages import FinishReason
from tgi_cli.router.generation.spec import GenerationSpec
from tgi_cli.router.generation.timings import Timings
from tgi_cli.router.http.errors import ApiError

logger = logging.getLogger(__name__)

_PATH_CHARACTERS = 128
_QUIET = ("/", "/health", "/ping", "/metrics", "/v2/health/live", "/v2/health/ready")
"""Asked every few seconds by probes; told at the level of debugging as long as all is well."""
_OURS = ("generation", "incomplete_generation", "internal")
"""Kinds of errors whose words are this server's own."""


class LoggedGeneration(Protocol):
    """What a record needs of a :class:`tgi_cli.router.generation.generation.Generation`."""

    index: int
    spec: GenerationSpec
    seed: int | None
    timings: Timings

    @property
    def lead(self) -> LoggedGeneration: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def generated_tokens(self) -> int: ...

    @property
    def finish_reason(self) -> FinishReason | None: ...


class AccessRecord:
    """What became of one HTTP request.

    Attributes:
        request_id: the client's ``x-request-id``, or one of ours.
        method, path: as they came; without the query.
        route: the pattern that the path matched; empty: none.
        status: of the answer; 0 before there is one.
        generations: the sequences that it was served with, in order.
        error: why it failed, perhaps within a stream whose status is 200.
        dropped: the client went before the end.
    """

    __slots__ = (
        "began", "began_ns", "dropped", "error", "generations", "method", "path", "request_id",
        "route", "status", "trace_id",
    )  # fmt: skip

    def __init__(self, request_id: str, method: str, path: str) -> None:
        self.request_id = request_id
        self.method = method
        self.path = path
        self.route = ""
        self.status = 0
        self.generations: list[LoggedGeneration] = []
        self.error: ApiError | None = None
        self.dropped = False
        self.trace_id = ""
        self.began = time.perf_counter()
        self.began_ns = time.time_ns()


_current: ContextVar[AccessRecord | None] = ContextVar("request", default=None)


def begin(record: AccessRecord) -> None:
    """Make it the record of the task that serves the request."""
    _current.set(record)


def record() -> AccessRecord | None:
    """The record of the request that this task serves; None outside of any."""
    return _current.get()


def note(error: ApiError) -> None:
    """Remember why the request failed; the first cause counts."""
    now = _current.get()
    if now is not None and now.error is None:
        now.error = error


def times(request: AccessRecord) -> dict[str, float]:
    """TGI's times of a request, in seconds, and when its first token came.

    Of several sequences, each time is that of the slowest.
    """
    found = [generation.timings for generation in request.generations]
    if not found:
        return {"total_time": time.perf_counter() - request.began}
    told = {
        "total_time": max(timing.total for timing in found),
        "validation_time": max(timing.validation for timing in found),
        "queue_time": max(timing.queue for timing in found),
        "inference_time": max(timing.inference for timing in found),
    }
    tokens = max(generation.generated_tokens for generation in request.generations)
    if tokens:
        told["time_per_token"] = told["inference_time"] / tokens
    first = [timing.first_token - timing.arrived for timing in found if timing.first_token]
    if first:
        told["time_to_first_token"] = min(first)
    return told


def usage(request: AccessRecord) -> dict[str, Any]:
    """Tokens, adapter, end and seed of a request that generated."""
    generations = request.generations
    if not generations:
        return {}
    prompts = {id(g.lead): g.lead.prompt_tokens for g in generations}
    ends = {g.finish_reason.name.lower(): None for g in generations if g.finish_reason is not None}
    told: dict[str, Any] = {
        "prompt_tokens": sum(prompts.values()),
        "generated_tokens": sum(g.generated_tokens for g in generations),
    }
    if ends:
        told["finish_reason"] = ",".join(ends)
    if len(generations) > 1:
        told["sequences"] = len(generations)
    elif generations[0].seed is not None:
        told["seed"] = generations[0].seed
    if generations[0].spec.adapter:
        told["adapter"] = generations[0].spec.adapter
    return told


def write(request: AccessRecord) -> None:
    """The line."""
    error = request.error
    failed = request.status >= 500 or (error is not None and error.status in (424, 500, 504))
    quiet = request.route in _QUIET and request.method != "POST" and request.status == 200
    level = logging.ERROR if failed else logging.DEBUG if quiet else logging.INFO
    if not logger.isEnabledFor(level):
        return
    fields: dict[str, Any] = {
        "request_id": request.request_id,
        "method": request.method,
        "route": request.route or _printable(request.path),
        "status": request.status,
    }
    fields |= usage(request)
    fields |= {name: round(seconds, 6) for name, seconds in times(request).items()}
    if error is not None:
        fields["error"] = error.error_type
        if error.error_type in _OURS:
            fields["cause"] = error.message
    elif request.dropped or request.status == 499:
        fields["error"] = "dropped"
    if request.trace_id:
        fields["trace_id"] = request.trace_id
    logger.log(level, "request", extra=fields)


def _printable(path: str) -> str:
    """A path that no route has, as one word of bounded length."""
    kept = path[:_PATH_CHARACTERS]
    return "".join(c if c.isascii() and c.isprintable() and c != " " else "?" for c in kept)
