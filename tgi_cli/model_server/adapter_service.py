"""Loading, unloading and listing adapters over the wire: the model server's end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import grpc

from tgi_cli.errors import ModelNotFoundError, TgiError
from tgi_cli.hub.lora_files import resolve_adapter, split_revision
from tgi_cli.model_server.adapters import AdapterRegistry, EngineEndedError
from tgi_cli.rpc import codec
from tgi_cli.rpc import engine_pb2 as pb
from tgi_cli.rpc.interface import AdapterError, AdapterFault
from tgi_cli.rpc.status import ADAPTER_STATUSES, shorten

MAX_CALLS = 4
"""Adapters that are fetched and loaded concurrently; each holds a thread that other calls need."""

MAX_SOURCE = 4096
"""Characters of a path, as on Linux."""


class AdapterServicer:
    """The calls of the service that are about adapters."""

    def __init__(self, adapters: AdapterRegistry) -> None:
        self.adapters = adapters
        self._calls = threading.BoundedSemaphore(MAX_CALLS)

    def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: grpc.ServicerContext
    ) -> pb.Adapters:
        source, revision = split_revision(request.source)

        def find() -> Path:
            if len(source) > MAX_SOURCE:
                raise AdapterError(
                    f"the path or id has {len(source)} characters, more than {MAX_SOURCE}"
                )
            try:
                return resolve_adapter(source, revision, absolute=True)
            except OSError as error:  # a name that is too long for the file system
                raise AdapterError(f"invalid adapter path: {error.strerror}") from error

        return self._run(context, lambda: self.adapters.load(request.name, find, request.in_place))

    def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: grpc.ServicerContext
    ) -> pb.Adapters:
        return self._run(context, lambda: self.adapters.unload(request.name))

    def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: grpc.ServicerContext
    ) -> pb.Adapters:
        return codec.encode_adapters(self.adapters.now)

    def _run(self, context: grpc.ServicerContext, work: Callable[[], None]) -> pb.Adapters:
        """Do the work and return the loaded adapters; errors become the call's status."""
        if not self._calls.acquire(blocking=False):
            busy = f"{MAX_CALLS} adapters are being loaded already; try again"
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, busy)
        try:
            work()
        except EngineEndedError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, shorten(error.cause))
        except TgiError as error:
            context.abort(ADAPTER_STATUSES[_fault(error)], shorten(one_line(error)))
        finally:
            self._calls.release()
        return codec.encode_adapters(self.adapters.now)


def _fault(error: TgiError) -> AdapterFault:
    if isinstance(error, AdapterError):
        return error.fault
    missing = isinstance(error, ModelNotFoundError)
    return AdapterFault.UNKNOWN if missing else AdapterFault.UNUSABLE


def one_line(error: TgiError) -> str:
    """Return cause and remedy."""
    return f"{error.cause}; {error.remedy}" if error.remedy else error.cause
