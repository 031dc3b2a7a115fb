"""Adapters while the server runs: ``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``.

Bodies, texts and codes are vLLM's: https://docs.vllm.ai/en/latest/features/lora/
"""

from __future__ import annotations

import logging

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tgi_cli.errors import ShardError
from tgi_cli.router.api.schemas.openai import LoadAdapterRequest, UnloadAdapterRequest
from tgi_cli.router.http import errors
from tgi_cli.router.http.bodies import read_json
from tgi_cli.router.state import RouterState, state_of
from tgi_cli.rpc.interface import AdapterError, AdapterFault

logger = logging.getLogger(__name__)

_LOAD = msgspec.json.Decoder(LoadAdapterRequest)
_UNLOAD = msgspec.json.Decoder(UnloadAdapterRequest)

_STATUS = {
    AdapterFault.UNUSABLE: 400,
    AdapterFault.TAKEN: 400,
    AdapterFault.UNKNOWN: 404,
    AdapterFault.OFF: 403,
    AdapterFault.BUSY: 429,
}


async def load_lora_adapter(request: Request) -> Response:
    """Load an adapter; answers when requests may name it."""
    state = _allowed(request)
    body = await read_json(request, _LOAD, state.config.payload_limit)
    if not body.lora_name or not body.lora_path:
        raise errors.bad_request("Both 'lora_name' and 'lora_path' must be provided.")
    try:
        await state.adapters.kept.load(body.lora_name, body.lora_path, body.load_inplace)
    except AdapterError as error:
        raise _refused(error) from error
    except ShardError as error:
        raise errors.engine_gone(error.cause) from error
    logger.info("adapter %s: loaded from %s", body.lora_name, body.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_lora_adapter(request: Request) -> Response:
    """Refuse new requests for an adapter; those in flight run to their end."""
    state = _allowed(request)
    body = await read_json(request, _UNLOAD, state.config.payload_limit)
    if not body.lora_name:
        raise errors.bad_request("'lora_name' needs to be provided to unload a LoRA adapter.")
    try:
        await state.adapters.kept.unload(body.lora_name)
    except AdapterError as error:
        raise _refused(error) from error
    except ShardError as error:
        raise errors.engine_gone(error.cause) from error
    logger.info("adapter %s: unloaded", body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _allowed(request: Request) -> RouterState:
    """The state, if adapters may be changed at all: whoever does makes the server read files."""
    state = state_of(request)
    if state.config.api_key is None:
        raise errors.forbidden(
            "adapters are loaded and unloaded only with an API key, and this server has none: "
            "start it with API_KEY set (or --api-key)"
        )
    if not state.client.adapters.max_loras:
        raise errors.forbidden(
            "adapters are off on this server: start it with --max-loras or --lora-adapters"
        )
    return state


def _refused(error: AdapterError) -> errors.ApiError:
    status = _STATUS[error.fault]
    if status == 404:
        return errors.ApiError(404, error.cause, "not_found", param="lora_name", code="not_found")
    if status == 403:
        return errors.forbidden(error.cause)
    if status == 429:
        return errors.ApiError(429, error.cause, "overloaded", headers={"retry-after": "1"})
    return errors.bad_request(error.cause)


ROUTES = [
    Route("/v1/load_lora_adapter", load_lora_adapter, methods=["POST"]),
    Route("/v1/unload_lora_adapter", unload_lora_adapter, methods=["POST"]),
]
