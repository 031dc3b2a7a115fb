"""Stubs and handlers that are made from descriptors, over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import Default
from google.protobuf.wrappers_pb2 import StringValue

from tgi_cli.model_server.grpc_server import EngineServer
from tgi_cli.rpc import engine_pb2, services
from tgi_cli.tgi_grpc import generate_v2_pb2, generate_v3_pb2
from tgi_cli.tgi_grpc.service import GenerateService

WORDS = ("one", "two", "three")


def _four_kinds() -> Any:
    """A message module whose service has a method of each kind."""
    file = FileDescriptorProto(
        name="tgi_test/four_kinds.proto",
        package="tgi_test",
        syntax="proto3",
        dependency=["google/protobuf/wrappers.proto"],
    )
    service = file.service.add(name="Words")
    for name, client_streaming, server_streaming in (
        ("Echo", False, False),
        ("Split", False, True),
        ("Join", True, False),
        ("Upper", True, True),
    ):
        service.method.add(
            name=name,
            input_type=".google.protobuf.StringValue",
            output_type=".google.protobuf.StringValue",
            client_streaming=client_streaming,
            server_streaming=server_streaming,
        )
    return SimpleNamespace(DESCRIPTOR=Default().AddSerializedFile(file.SerializeToString()))


FOUR_KINDS = _four_kinds()


class Words:
    """Serves ``FOUR_KINDS``."""

    def Echo(self, request: StringValue, context: grpc.ServicerContext) -> StringValue:
        return request

    def Split(self, request: StringValue, context: grpc.ServicerContext) -> Iterator[StringValue]:
        return (StringValue(value=word) for word in request.value.split())

    def Join(self, requests: Iterator[StringValue], context: grpc.ServicerContext) -> StringValue:
        return StringValue(value=" ".join(request.value for request in requests))

    def Upper(
        self, requests: Iterator[StringValue], context: grpc.ServicerContext
    ) -> Iterator[StringValue]:
        return (StringValue(value=request.value.upper()) for request in requests)


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    services.add_to_server(FOUR_KINDS, Words(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def test_a_blocking_stub_calls_methods_of_each_kind(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = services.make_stub(FOUR_KINDS, channel)
        sent = [StringValue(value=word) for word in WORDS]
        whole = StringValue(value=" ".join(WORDS))
        assert stub.Echo(whole, timeout=60) == whole
        assert list(stub.Split(whole, timeout=60)) == sent
        assert stub.Join(iter(sent), timeout=60) == whole
        upper = [answer.value for answer in stub.Upper(iter(sent), timeout=60)]
        assert upper == ["ONE", "TWO", "THREE"]


async def test_a_stub_on_an_asyncio_channel_is_awaited(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = services.make_stub(FOUR_KINDS, channel)
        sent = [StringValue(value=word) for word in WORDS]
        whole = StringValue(value=" ".join(WORDS))
        assert await stub.Echo(whole, timeout=60) == whole
        assert [answer async for answer in stub.Split(whole, timeout=60)] == sent
        assert await stub.Join(iter(sent), timeout=60) == whole
        upper = [answer.value async for answer in stub.Upper(iter(sent), timeout=60)]
        assert upper == ["ONE", "TWO", "THREE"]


class _RecordingServer:
    """Keeps the handlers that are registered, instead of serving them."""

    def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None:
        self.service, self.handlers = service_name, method_handlers


@pytest.mark.parametrize(
    ("messages", "servicer", "service"),
    [
        (engine_pb2, EngineServer, "tgi.engine.v1.Engine"),
        (generate_v2_pb2, GenerateService, "generate.v2.TextGenerationService"),
        (generate_v3_pb2, GenerateService, "generate.v3.TextGenerationService"),
    ],
)
def test_servers_implement_every_method_with_its_messages_and_kind(
    messages: ModuleType, servicer: type, service: str
) -> None:
    server: Any = _RecordingServer()
    services.add_to_server(messages, servicer, server)
    assert server.service == service
    methods = {method.name: method for method in services.service_of(messages).methods}
    assert server.handlers.keys() == methods.keys()
    for name, handler in server.handlers.items():
        method = methods[name]
        assert handler.request_streaming is method.client_streaming
        assert handler.response_streaming is method.server_streaming
        request = getattr(messages, method.input_type.name)()
        response = getattr(messages, method.output_type.name)()
        assert type(handler.request_deserializer(b"")) is type(request)
        assert handler.response_serializer(response) == b""


def test_a_method_that_is_not_implemented_is_an_error_at_once() -> None:
    server: Any = _RecordingServer()
    with pytest.raises(AttributeError, match="Split"):
        services.add_to_server(FOUR_KINDS, SimpleNamespace(Echo=print), server)
