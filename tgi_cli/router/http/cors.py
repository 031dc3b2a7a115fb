"""Pages of other origins that may use the server: https://fetch.spec.whatwg.org/#http-cors-protocol.

TGI let every page in, but no page send an API key; here pages may send what clients send.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

_SENT = (
    "authorization",
    "content-type",
    "traceparent",
    "tracestate",
    "x-request-id",
    "x-request-timeout",
)
_READ = (
    "retry-after",
    "x-compute-characters",
    "x-compute-time",
    "x-compute-type",
    "x-generated-tokens",
    "x-inference-time",
    "x-prompt-tokens",
    "x-queue-time",
    "x-request-id",
    "x-time-per-token",
    "x-total-time",
    "x-validation-time",
)
_SDK = (
    "user-agent",
    "x-stainless-arch",
    "x-stainless-lang",
    "x-stainless-os",
    "x-stainless-package-version",
    "x-stainless-retry-count",
    "x-stainless-runtime",
    "x-stainless-runtime-version",
    "x-stainless-timeout",
    "openai-organization",
    "openai-project",
)
"""What OpenAI's client for browsers sends along."""


def cors(origins: Sequence[str]) -> Middleware:
    """The middleware that answers browsers; no origins: all may."""
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins) or ["*"],
        allow_methods=["GET", "POST"],
        allow_headers=[*_SENT, *_SDK],
        expose_headers=list(_READ),
    )
