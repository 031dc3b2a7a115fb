"""Loading, unloading and listing adapters over the wire: the router's end, and status codes."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from tgi_cli.errors import ShardError
from tgi_cli.rpc import codec
from tgi_cli.rpc.interface import AdapterError, AdapterFault, Adapters

STATUS_CODES = {
    AdapterFault.UNUSABLE: grpc.StatusCode.INVALID_ARGUMENT,
    AdapterFault.TAKEN: grpc.StatusCode.ALREADY_EXISTS,
    AdapterFault.UNKNOWN: grpc.StatusCode.NOT_FOUND,
    AdapterFault.OFF: grpc.StatusCode.FAILED_PRECONDITION,
    AdapterFault.BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_FAULTS = {code: fault for fault, code in STATUS_CODES.items()}


async def call(method: Any, message: object, timeout: float | None = None) -> Adapters:  # noqa: ASYNC109
    """The client's end of any of the calls.

    Args:
        method: of the stub.
        message: its request.
        timeout: seconds; None: as long as it takes.

    Raises:
        AdapterError: the engine's side said no.
        ShardError: it is gone.
    """
    try:
        return codec.decode_adapters(await method(message, timeout=timeout))
    except grpc.aio.AioRpcError as error:
        details = error.details() or str(error.code())
        fault = _FAULTS.get(error.code())
        if fault is None:
            raise ShardError(f"the model server did not answer: {details}") from error
        raise AdapterError(details, fault=fault) from error
