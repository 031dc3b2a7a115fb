"""A span as other processes know it: https://www.w3.org/TR/trace-context/."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The headers by which spans of another process become children of a span.

    Attributes:
        traceparent: ids of the trace and of the span, and whether the trace is sampled.
        tracestate: what tracing systems have added for each other; may be empty.
    """

    traceparent: str
    tracestate: str = ""
