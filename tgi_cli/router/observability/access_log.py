"""One log line for each request, without its texts.

The code that serves a request adds to its record, :func:`record`. Errors are logged by their type,
as their messages may repeat what the client has sent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from tgi_cli.engine.messages import FinishReason
from tgi_cli.router.generation.draft_counts import DraftCounts
from tgi_cli.router.generation.spec import GenerationSpec
from tgi_cli.router.generation.timings import Timings
from tgi_cli.router.http.errors import ApiError
from tgi_cli.telemetry.context import TraceContext

logger = logging.getLogger(__name__)

_PATH_CHARACTERS = 128
_QUIET = (
    "/", "/health", "/ping", "/metrics", "/v2/health/live", "/v2/health/ready",
    "/web-ui/{name:path}",
)  # fmt: skip
"""Routes of probes and of the web UI's files, whose successes are logged at level DEBUG."""
_OURS = ("generation", "incomplete_generation", "internal")
"""Types of errors whose messages never repeat what clients sent."""


class LoggedGeneration(Protocol):
    """What a record needs of a :class:`tgi_cli.router.generation.generation.Generation`."""

    index: int
    spec: GenerationSpec
    seed: int | None
    timings: Timings
    drafts: DraftCounts
    cached_tokens: int

    @property
    def lead(self) -> LoggedGeneration: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def generated_tokens(self) -> int: ...

    @property
    def reasoning_tokens(self) -> int: ...

    @property
    def finish_reason(self) -> FinishReason | None: ...


class TracedRequest(Protocol):
    """The spans of a request that is traced."""

    def work(self) -> TraceContext | None:
        """Begin the span of the model's work; its context, or None if it is not sampled."""
        ...

    def sequences_ended(self) -> None:
        """Called when no sequence of the request runs any more."""
        ...


@dataclass(slots=True)
class AccessRecord:
    """One HTTP request, from its head to the end of its answer.

    Attributes:
        request_id: the client's ``x-request-id``, or a generated one.
        path: without the query.
        route: pattern that the path matched, or empty.
        status: status of the answer, or 0 before it starts.
        generations: its sequences, in order.
        error: why it failed, perhaps within a stream whose status is 200.
        dropped: the client disconnected before the end.
        expected: its failure is none of the server: a health check while it shuts down.
        operation: what the model does, by OpenTelemetry's name: ``chat`` or ``text_completion``.
        model: that it names, or empty.
        streamed: its answer is a stream of events; known if it is traced.
        running: number of its sequences that run.
        trace_id: in hexadecimal digits; empty without tracing.
        sampled_trace: the same if the trace is sampled, or empty.
        span: its spans, or None without tracing.
    """

    request_id: str
    method: str
    path: str
    route: str = ""
    status: int = 0
    generations: list[LoggedGeneration] = field(default_factory=list)
    error: ApiError | None = None
    dropped: bool = False
    expected: bool = False
    operation: str = "text_completion"
    model: str = ""
    streamed: bool = False
    running: int = 0
    trace_id: str = ""
    sampled_trace: str = ""
    span: TracedRequest | None = None
    began: float = field(default_factory=time.perf_counter)
    began_ns: int = field(default_factory=time.time_ns)

    @property
    def failed(self) -> bool:
        """Whether the server has failed, not its client."""
        by_error = self.error is not None and self.error.status in (424, 500, 504)
        return (self.status >= 500 or by_error) and not self.expected

    @property
    def error_type(self) -> str:
        """The type of its error, ``dropped`` or a status; empty if it has not failed."""
        if self.error is not None:
            return self.error.error_type
        if self.dropped or self.status == 499:
            return "dropped"
        return str(self.status) if self.failed else ""

    @property
    def printable_path(self) -> str:
        """Its path as one word of bounded length."""
        path = self.path[:_PATH_CHARACTERS]
        return "".join(c if c.isascii() and c.isprintable() and c != " " else "?" for c in path)


_current: ContextVar[AccessRecord | None] = ContextVar("request", default=None)


def begin(record: AccessRecord) -> None:
    """Set the record of the current task."""
    _current.set(record)


def record() -> AccessRecord | None:
    """The record of the request that the current task serves, or None."""
    return _current.get()


def note(error: ApiError) -> None:
    """Record why the request failed, unless an error is recorded already."""
    now = _current.get()
    if now is not None and now.error is None:
        now.error = error


def times(request: AccessRecord) -> dict[str, float]:
    """TGI's times of a request and the time to its first token, in seconds.

    Each is that of the slowest of its sequences, but the first token that of the fastest.
    """
    found = [generation.timings for generation in request.generations]
    if not found:
        return {"total_time": time.perf_counter() - request.began}
    seconds = {
        f"{name}_time": max(getattr(timing, name) for timing in found)
        for name in ("total", "validation", "queue", "inference")
    }
    tokens = max(generation.generated_tokens for generation in request.generations)
    if tokens:
        seconds["time_per_token"] = seconds["inference_time"] / tokens
    first = [timing.first_token - timing.arrived for timing in found if timing.first_token]
    if first:
        seconds["time_to_first_token"] = min(first)
    return seconds


def usage(request: AccessRecord) -> dict[str, Any]:
    """Tokens, drafts, finish reasons, seed and adapter of a request that generated."""
    generations = request.generations
    if not generations:
        return {}
    prompts = {id(g.lead): g.lead.prompt_tokens for g in generations}
    ended = [g.finish_reason for g in generations if g.finish_reason is not None]
    reasons = dict.fromkeys(reason.name.lower() for reason in ended)
    seed, adapter = generations[0].seed, generations[0].spec.adapter
    fields: dict[str, Any] = {
        "prompt_tokens": sum(prompts.values()),
        "generated_tokens": sum(g.generated_tokens for g in generations),
    }
    drafted = sum(g.drafts.drafted for g in generations)
    if drafted:
        fields["drafted_tokens"] = drafted
        fields["accepted_tokens"] = sum(g.drafts.accepted for g in generations)
        fields["drafts"] = _by_source(g.drafts.by_source for g in generations)
    if reasons:
        fields["finish_reason"] = ",".join(reasons)
    if len(generations) > 1:
        fields["sequences"] = len(generations)
    elif seed is not None:
        fields["seed"] = seed
    if adapter:
        fields["adapter"] = adapter
    return fields


def write(request: AccessRecord) -> None:
    """Log the request."""
    error, failed = request.error, request.failed
    quiet = request.route in _QUIET and request.method != "POST" and request.status == 200
    level = logging.ERROR if failed else logging.DEBUG if quiet else logging.INFO
    if not logger.isEnabledFor(level):
        return
    fields: dict[str, Any] = {
        "request_id": request.request_id,
        "method": request.method,
        "route": request.route or request.printable_path,
        "status": request.status,
    }
    fields |= usage(request)
    fields |= {name: round(seconds, 6) for name, seconds in times(request).items()}
    if error is not None:
        fields["error"] = error.error_type
        fields |= {"param": error.param} if error.param else {}
        fields |= {"code": error.code} if error.code else {}
        if error.error_type in _OURS:
            fields["cause"] = error.message
    elif request.dropped or request.status == 499:
        fields["error"] = "dropped"
    if request.trace_id:
        fields["trace_id"] = request.trace_id
    logger.log(level, "request", extra=fields)


def _by_source(sequences: Iterable[Mapping[str, tuple[int, int]]]) -> dict[str, list[int]]:
    """Draft tokens verified and accepted by where they came from, of all sequences."""
    found: dict[str, list[int]] = {}
    for sequence in sequences:
        for source, (drafted, accepted) in sequence.items():
            totals = found.setdefault(source, [0, 0])
            totals[0] += drafted
            totals[1] += accepted
    return found
