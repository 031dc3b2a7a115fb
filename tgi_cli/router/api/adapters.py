"""Adapters while the server runs: ``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``.

Bodies, texts and codes are vLLM's: https://docs.vllm.ai/en/latest/features/lora/
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from starlette.responses import PlainTextResponse, Response

from tgi_cli.errors import ShardError
from tgi_cli.router.api.schemas.openai import LoadAdapterRequest, UnloadAdapterRequest
from tgi_cli.router.http import errors
from tgi_cli.router.http.endpoint import Endpoint, Operation, RequestContext
from tgi_cli.router.state import RouterState
from tgi_cli.rpc.interface import AdapterError, AdapterFault

logger = logging.getLogger(__name__)


async def load_lora_adapter(context: RequestContext[LoadAdapterRequest]) -> Response:
    """Load an adapter; answers when requests may name it."""
    body = context.body
    if not body.lora_name or not body.lora_path:
        raise errors.bad_request("Both 'lora_name' and 'lora_path' must be provided.")
    await context.state.sleep.wake()
    with _adapter_errors():
        await context.state.adapters.dynamic.load(body.lora_name, body.lora_path, body.load_inplace)
    logger.info("adapter %s: loaded from %s", body.lora_name, body.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_lora_adapter(context: RequestContext[UnloadAdapterRequest]) -> Response:
    """Refuse new requests for an adapter; those in flight run to their end."""
    body = context.body
    if not body.lora_name:
        raise errors.bad_request("'lora_name' needs to be provided to unload a LoRA adapter.")
    await context.state.sleep.wake()
    with _adapter_errors():
        await context.state.adapters.dynamic.unload(body.lora_name)
    logger.info("adapter %s: unloaded", body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _require_allowed(state: RouterState) -> None:
    """Raise ApiError, 403, unless clients may have the server read files."""
    if state.config.api_key is None:
        raise errors.forbidden(
            "adapters are loaded and unloaded only with an API key, and this server has none: "
            "start it with API_KEY set (or --api-key)"
        )
    if not state.client.adapters.max_loras:
        raise errors.forbidden(
            "adapters are off on this server: start it with --max-loras or --lora-adapters"
        )


@contextmanager
def _adapter_errors() -> Iterator[None]:
    """Raise ApiError for the errors of an engine that loads or unloads."""
    try:
        yield
    except ShardError as error:
        raise errors.engine_gone(error.cause) from error
    except AdapterError as error:
        cause = error.cause
        if error.fault is AdapterFault.UNKNOWN:
            found = errors.ApiError(404, cause, "not_found", param="lora_name", code="not_found")
        elif error.fault is AdapterFault.OFF:
            found = errors.forbidden(cause)
        elif error.fault is AdapterFault.BUSY:
            found = errors.ApiError(429, cause, "overloaded", headers={"retry-after": "1"})
        else:
            found = errors.bad_request(cause)
        raise found from error


_LOAD = Operation(
    tag="Adapters",
    body=(LoadAdapterRequest,),
    answer=(str,),
    media_type="text/plain",
    errors=(403, 404, 429, 503),
)
_UNLOAD = replace(_LOAD, body=(UnloadAdapterRequest,))

ROUTES = [
    Endpoint("/v1/load_lora_adapter", load_lora_adapter, _LOAD, require=_require_allowed),
    Endpoint("/v1/unload_lora_adapter", unload_lora_adapter, _UNLOAD, require=_require_allowed),
]
