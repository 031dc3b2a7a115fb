"""The spans of requests in the model server, which continue those of their routers.

A router sends the context of its span with a request that is traced and sampled; of others nothing
is recorded. A request has a span of the server, and below it one for each of its stages: ``queue``,
``prefill`` to its first token, ``decode`` to its last.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from tgi_cli.config import ServeConfig
from tgi_cli.engine.messages import Finished, FinishReason, GenerationRequest, StepOutputs
from tgi_cli.model_server.rpc_spans import RpcSpans
from tgi_cli.telemetry.context import TraceContext
from tgi_cli.telemetry.tracer import Tracer, fail, service_name

_STAGES = ("queue", "prefill", "decode")
_FAULTS = (FinishReason.ERROR, FinishReason.GRAMMAR)
_FAILURES = (*_FAULTS, FinishReason.TIMEOUT, FinishReason.OVERLOADED)


class _TracedRequest:
    """A request that runs. Times are those of ``time.time_ns()``, 0 before they are known."""

    __slots__ = (
        *("arrived", "cached_tokens", "first_token", "generated_tokens", "prompt_tokens"),
        *("parent", "started"),
    )

    def __init__(self, parent: TraceContext, prompt_tokens: int) -> None:
        self.parent = parent
        self.prompt_tokens = prompt_tokens
        self.arrived = time.time_ns()
        self.started = self.first_token = 0
        self.cached_tokens = self.generated_tokens = 0


class RequestSpans:
    """Records spans as requests end.

    Sessions' readers call :meth:`begin`, one other thread the other methods.

    Attributes:
        calls: records the calls of TGI's router.
    """

    def __init__(self, tracer: Tracer) -> None:
        self.calls = RpcSpans(tracer)
        self._tracer = tracer
        self._live: dict[int, _TracedRequest] = {}
        self._lock = threading.Lock()

    def begin(self, engine_id: int, request: GenerationRequest) -> None:
        """A request has arrived, whose outputs will have the id ``engine_id``."""
        if request.trace is not None:
            with self._lock:
                self._live[engine_id] = _TracedRequest(request.trace, len(request.prompt_ids))

    def take(self, outputs: StepOutputs) -> None:
        """Record what a step has given; costs nothing while no request is traced."""
        live = self._live
        if not live:
            return
        now = time.time_ns()
        for started in outputs.started:
            request = live.get(started.request_id)
            if request is not None:
                request.started = request.arrived + started.queue_ns
                request.cached_tokens = started.cached_tokens
        for request_id in outputs.request_ids:
            request = live.get(request_id)
            if request is not None:
                request.generated_tokens += 1
                request.first_token = request.first_token or now
        for finished in outputs.finished:
            self._end(finished, now)

    def close(self) -> None:
        """The engine has ended: end all spans, and send them for two seconds at most."""
        self._end_all(self._live.keys())
        self._tracer.close()

    def _end_all(self, request_ids: Iterable[int]) -> None:
        for request_id in list(request_ids):
            self._end(Finished(request_id, FinishReason.ERROR), time.time_ns())

    def _end(self, finished: Finished, now: int) -> None:
        with self._lock:
            request = self._live.pop(finished.request_id, None)
        if request is None:
            return
        reason = finished.reason
        whole = self._tracer.start(
            "generate",
            "server",
            request.parent,
            request.arrived,
            {
                "finish_reason": reason.name.lower(),
                "prompt_tokens": request.prompt_tokens,
                "cached_tokens": request.cached_tokens,
                "generated_tokens": request.generated_tokens,
            },
        )
        moments = (request.arrived, request.started, request.first_token, now)
        for name, (begin, end) in zip(_STAGES, pairwise(moments), strict=True):
            if begin:
                stage = self._tracer.start(name, "internal", whole, begin)
                stage.end(max(end, begin) if end else now)
        if reason in _FAILURES:
            fail(whole, reason.name.lower(), reason in _FAULTS)
        whole.end(now)


def open_request_spans(serve: ServeConfig, replica: int | None) -> RequestSpans | None:
    """What records the spans of a model server; None without ``--otlp-endpoint``.

    Raises:
        ConfigError: the endpoint is no URL, or the SDK is not installed.
    """
    if not serve.otlp_endpoint:
        return None
    resource: dict[str, Any] = {} if replica is None else {"tgi.replica": replica}
    name = service_name(serve.otlp_service_name, "server")
    return RequestSpans(Tracer(serve.otlp_endpoint, name, "tgi_cli.model_server", resource))
