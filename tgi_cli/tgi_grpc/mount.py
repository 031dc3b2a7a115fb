"""Puts TGI's own services beside the engine's on a gRPC server, and lets them be found."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import grpc
from grpc_reflection.v1alpha import reflection

from tgi_cli.engine.messages import EngineInfo
from tgi_cli.errors import AddressInUseError, ConfigError
from tgi_cli.model_server.adapters import AdapterRegistry
from tgi_cli.process import unix_socket
from tgi_cli.rpc import engine_pb2
from tgi_cli.tgi_grpc import (
    generate_v2_pb2,
    generate_v2_pb2_grpc,
    generate_v3_pb2,
    generate_v3_pb2_grpc,
)
from tgi_cli.tgi_grpc.requests import RequestReader, Watermark
from tgi_cli.tgi_grpc.service import GenerateService
from tgi_cli.tgi_grpc.step_client import Inbox, StepClient

if TYPE_CHECKING:
    from tgi_cli.tgi_grpc.model_text import ModelText

_VERSIONS: tuple[tuple[ModuleType, Callable[..., None]], ...] = (
    (generate_v2_pb2, generate_v2_pb2_grpc.add_TextGenerationServiceServicer_to_server),
    (generate_v3_pb2, generate_v3_pb2_grpc.add_TextGenerationServiceServicer_to_server),
)


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """That the services are wanted, and how.

    Attributes:
        load_text: loads the text side of the model; see
            :func:`tgi_cli.tgi_grpc.model_text.load_model_text`.
        uds_path: TGI's ``--uds-path``: they are to be found on ``<uds_path>-0`` as well. None:
            on the server's own socket alone.
        watermark: of requests that ask for one.
    """

    load_text: Callable[[EngineInfo], ModelText]
    uds_path: Path | None = None
    watermark: Watermark = field(default_factory=Watermark)

    @property
    def socket(self) -> Path | None:
        """Where the first shard listens, who leads all others."""
        if self.uds_path is None:
            return None
        return self.uds_path.with_name(f"{self.uds_path.name}-0")


class GenerateServices:
    """generate.v2 and generate.v3 over one engine, and the reflection of all services.

    The model's texts are made before anybody calls where the services have a socket of their own,
    and with the first request elsewhere: who never uses them need not wait for a tokenizer.

    Args:
        inbox: of the engine.
        info: of the engine.
        adapters: that requests may name.
        options: how they are wanted.
        path: the server's own socket.
    """

    afar = False

    def __init__(
        self,
        inbox: Inbox,
        info: EngineInfo,
        adapters: AdapterRegistry,
        options: GenerateOptions,
        path: Path,
    ) -> None:
        self._driver = StepClient(inbox)
        self._socket = options.socket
        self._load_text = partial(options.load_text, info)
        self._model_text: ModelText | None = None
        reader = RequestReader(info, self.model_text, adapters, options.watermark)
        url = f"unix://{(self._socket or path).absolute()}"
        self._services = [
            GenerateService(messages, self._driver, info, reader, url) for messages, _ in _VERSIONS
        ]

    def model_text(self) -> ModelText:
        """The text side, loaded by the first call. One call at a time. Raises ModelError."""
        if self._model_text is None:
            self._model_text = self._load_text()
        return self._model_text

    def add_to(self, server: grpc.Server) -> None:
        """Before the server is started.

        Raises:
            ConfigError, AddressInUseError: the socket cannot be used.
            ModelError: the tokenizer cannot be read.
        """
        if self._socket is not None:
            self.model_text()
        for service, (_, add) in zip(self._services, _VERSIONS, strict=True):
            add(service, server)
        modules = [engine_pb2, *(messages for messages, _ in _VERSIONS)]
        names = [
            service.full_name
            for module in modules
            for service in module.DESCRIPTOR.services_by_name.values()
        ]
        reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
        if self._socket is not None:
            _bind(server, self._socket)

    def drain(self) -> None:
        """Refuse new batches from now on; those that are here may be driven to their end."""
        self._driver.drain("the model server is shutting down")

    def end(self, cause: str) -> None:
        """The engine's loop is over: nobody is kept waiting."""
        self._driver.end(cause)
        if self._model_text is not None:
            self._model_text.close()


def _bind(server: grpc.Server, path: Path) -> None:
    """Listen on a socket of TGI's naming."""
    claim(path)
    before = os.umask(0o177)  # so that nobody can connect before its mode is set
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise AddressInUseError(f"cannot listen on {path}: {error}") from error
    finally:
        os.umask(before)


def claim(path: Path) -> None:
    """Make ``path``, which by default lies in /tmp, ready to be bound.

    The folder may be open to others, as long as they can neither enter the socket nor put
    another in its place.

    Raises:
        ConfigError, AddressInUseError: it cannot be used.
    """
    try:
        private = unix_socket.is_private(path.parent)
    except OSError as error:
        raise ConfigError(
            f"the socket's folder {path.parent} cannot be used: {error.strerror}"
        ) from error
    if private:
        unix_socket.claim(path)
    else:
        _claim_in_shared(path)


def _claim_in_shared(path: Path) -> None:
    mode = path.parent.stat().st_mode
    if mode & 0o022 and not mode & stat.S_ISVTX:
        raise ConfigError(
            f"other users may replace files in {path.parent}, where the socket is to be",
            "use a folder of your own with mode 0700: who answers there poses as the model",
        )
    if len(os.fsencode(path)) > unix_socket.MAX_PATH_BYTES:
        raise ConfigError(
            f"the socket path {path} is longer than {unix_socket.MAX_PATH_BYTES} bytes",
            "choose a shorter one",
        )
    if unix_socket.is_listening(path):
        raise AddressInUseError(
            f"a model server listens on {path} already",
            "stop it, or choose another --shard-uds-path",
        )
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise AddressInUseError(f"{path} is in the way: {error.strerror}") from error
