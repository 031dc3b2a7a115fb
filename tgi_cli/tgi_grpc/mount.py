"""Serves TGI's own services beside the engine's, with reflection."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_reflection.v1alpha import reflection

from tgi_cli.engine.messages import EngineInfo
from tgi_cli.errors import AddressInUseError
from tgi_cli.model_server.grpc_service import GrpcService, ServedEngine
from tgi_cli.process import unix_socket
from tgi_cli.rpc import engine_pb2
from tgi_cli.rpc.services import add_to_server, service_of
from tgi_cli.tgi_grpc import generate_v2_pb2, generate_v3_pb2
from tgi_cli.tgi_grpc.requests import RequestReader, Watermark
from tgi_cli.tgi_grpc.service import GenerateService
from tgi_cli.tgi_grpc.step_client import StepClient

if TYPE_CHECKING:
    from tgi_cli.tgi_grpc.model_text import ModelText

_VERSIONS = (generate_v2_pb2, generate_v3_pb2)


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Options of the services.

    Attributes:
        load_text: Loads the text side of a model; see
            :func:`tgi_cli.tgi_grpc.model_text.load_model_text`.
        uds_path: TGI's ``--uds-path``: the services listen on ``<uds_path>-0`` too. None for the
            server's own socket alone.
        watermark: Parameters for requests that ask for a watermark.
        drafts: Whether steps verify drafts, and may give a request several tokens.
    """

    load_text: Callable[[EngineInfo], ModelText]
    uds_path: Path | None = None
    watermark: Watermark = field(default_factory=Watermark)
    drafts: bool = False

    @property
    def socket(self) -> Path | None:
        """The socket of the first shard, which leads all others."""
        if self.uds_path is None:
            return None
        return self.uds_path.with_name(f"{self.uds_path.name}-0")

    def claim(self) -> None:
        """Check before a model is loaded that the socket can be bound.

        Raises:
            ConfigError, AddressInUseError: It cannot.
        """
        if self.socket is not None:
            unix_socket.claim(self.socket, allow_shared=True)


class GenerateServices(GrpcService):
    """generate.v2 and generate.v3 over one engine, and the reflection of all services.

    The tokenizer is loaded at once if the services have a socket of their own, otherwise with the
    first request: servers that never use them need not wait for it.
    """

    def __init__(self, engine: ServedEngine, options: GenerateOptions) -> None:
        self._client = StepClient(engine.inbox)
        self._socket = options.socket
        self._load_text = partial(options.load_text, engine.info)
        self._model_text: ModelText | None = None
        reader = RequestReader(engine.info, self.model_text, engine.adapters, options.watermark)
        url = f"unix://{(self._socket or engine.uds_path).absolute()}"
        info = engine.info if options.drafts else replace(engine.info, speculate=0)
        self._services = [
            GenerateService(messages, self._client, info, reader, url) for messages in _VERSIONS
        ]

    def model_text(self) -> ModelText:
        """The text side, loaded by the first call. One call at a time. Raises ModelError."""
        if self._model_text is None:
            self._model_text = self._load_text()
        return self._model_text

    def add_to(self, server: grpc.Server) -> None:
        """Add the services to a server that is not started yet.

        Raises:
            ConfigError, AddressInUseError: The socket cannot be used.
            ModelError: The tokenizer cannot be loaded.
        """
        if self._socket is not None:
            self.model_text()
        for messages, service in zip(_VERSIONS, self._services, strict=True):
            add_to_server(messages, service, server)
        names = [service_of(messages).full_name for messages in (engine_pb2, *_VERSIONS)]
        reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
        if self._socket is not None:
            _bind(server, self._socket)

    def drain(self) -> None:
        """Refuse new batches from now on; existing ones may be decoded to their end."""
        self._client.drain("the model server is shutting down")

    def end(self, cause: str) -> None:
        """End calls that wait: the engine's loop has ended."""
        self._client.end(cause)
        if self._model_text is not None:
            self._model_text.close()


def _bind(server: grpc.Server, path: Path) -> None:
    """Listen on a socket of TGI's naming."""
    unix_socket.claim(path, allow_shared=True)
    before = os.umask(0o177)  # no other user can connect before its mode is set
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise AddressInUseError(f"cannot listen on {path}: {error}") from error
    finally:
        os.umask(before)
