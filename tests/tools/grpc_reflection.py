"""A gRPC client without stubs, which asks the server's reflection service for messages."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, cast

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

SECONDS = 60.0


class ReflectionClient:
    """One service of a server: ``client.Decode(batches=[...])`` sends a ``DecodeRequest``.

    Messages are made with ``client.message("Batch", id=1)``.
    """

    def __init__(self, target: str, service: str) -> None:
        self._channel = grpc.insecure_channel(
            target,
            options=[
                ("grpc.max_receive_message_length", (1 << 31) - 1),
                ("grpc.enable_http_proxy", 0),
                # One connection per client, as of clients in processes of their own.
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )
        grpc.channel_ready_future(self._channel).result(timeout=SECONDS)
        database = ProtoReflectionDescriptorDatabase(self._channel)
        self.services = tuple(database.get_services())
        self._pool = DescriptorPool(database)
        self.descriptor = self._pool.FindServiceByName(service)

    def __enter__(self) -> ReflectionClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.close()

    def message(self, name: str, **fields: Any) -> Any:
        """A message of the service's package."""
        full = f"{self.descriptor.file.package}.{name}"
        return GetMessageClass(self._pool.FindMessageTypeByName(full))(**fields)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = self.descriptor.methods_by_name.get(name)
        if method is None:
            raise AttributeError(name)
        request, response = (
            GetMessageClass(kind) for kind in (method.input_type, method.output_type)
        )
        call = self._channel.unary_unary(
            f"/{self.descriptor.full_name}/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )

        def send(message: Any = None, **fields: Any) -> Any:
            return cast(Any, call)(message or request(**fields), timeout=SECONDS)

        setattr(self, name, send)
        return send
