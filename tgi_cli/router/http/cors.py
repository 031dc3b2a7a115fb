"""Cross-origin requests of browsers: https://fetch.spec.whatwg.org/#http-cors-protocol.

Unlike TGI's, they may have an API key, and all headers that other clients send.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

_REQUEST_HEADERS = (
    "authorization", "content-type", "traceparent", "tracestate", "x-request-id",
    "x-request-timeout",
    # those of Anthropic's clients
    "x-api-key", "anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access",
    # those of OpenAI's client for browsers
    "user-agent", "openai-organization", "openai-project", "x-stainless-arch", "x-stainless-lang",
    "x-stainless-os", "x-stainless-package-version", "x-stainless-retry-count",
    "x-stainless-runtime", "x-stainless-runtime-version", "x-stainless-timeout",
)  # fmt: skip
_RESPONSE_HEADERS = (
    "request-id", "retry-after", "x-compute-characters", "x-compute-time", "x-compute-type",
    "x-generated-tokens", "x-inference-time", "x-prompt-tokens", "x-queue-time", "x-request-id",
    "x-time-per-token", "x-total-time", "x-validation-time",
)  # fmt: skip


def cors(origins: Sequence[str]) -> Middleware:
    """The middleware that allows these origins. Default: all."""
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins) or ["*"],
        allow_methods=["GET", "POST"],
        allow_headers=list(_REQUEST_HEADERS),
        expose_headers=list(_RESPONSE_HEADERS),
    )
