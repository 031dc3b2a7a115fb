"""Client stubs and server handlers of gRPC services, made from the services' descriptors.

They replace the code of protoc's gRPC plugin: https://grpc.io/docs/languages/python/generated-code
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

_KINDS = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}
"""gRPC's names, by whether the client streams and whether the server does."""


def service_of(messages: ModuleType) -> ServiceDescriptor:
    """Return the service of a generated message module, which defines one."""
    services: list[ServiceDescriptor] = list(messages.DESCRIPTOR.services_by_name.values())
    (service,) = services
    return service


def make_stub(messages: ModuleType, channel: grpc.Channel | grpc.aio.Channel) -> Any:
    """Return an object with a callable for each method of a module's service.

    The callables are the channel's multicallables: they block or are awaited as the channel's do.
    """
    service = service_of(messages)
    callables = {}
    for method in service.methods:
        request, response = _message_classes(method)
        callables[method.name] = getattr(channel, _kind(method))(
            f"/{service.full_name}/{method.name}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
    return SimpleNamespace(**callables)


def add_to_server(messages: ModuleType, servicer: object, server: grpc.Server) -> None:
    """Serve a module's service with the methods of the same names of ``servicer``.

    Raises:
        AttributeError: ``servicer`` lacks one of them.
    """
    service = service_of(messages)
    handlers = {}
    for method in service.methods:
        request, response = _message_classes(method)
        handlers[method.name] = getattr(grpc, f"{_kind(method)}_rpc_method_handler")(
            getattr(servicer, method.name),
            request_deserializer=request.FromString,
            response_serializer=response.SerializeToString,
        )
    server.add_registered_method_handlers(service.full_name, handlers)


def _kind(method: MethodDescriptor) -> str:
    return _KINDS[method.client_streaming, method.server_streaming]


def _message_classes(method: MethodDescriptor) -> tuple[Any, Any]:
    return GetMessageClass(method.input_type), GetMessageClass(method.output_type)
