"""The interface of services that share the engine's gRPC server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, ClassVar

import grpc

from tgi_cli.engine.messages import EngineInfo
from tgi_cli.model_server.adapters import AdapterRegistry

if TYPE_CHECKING:
    from tgi_cli.engine.core import Inbound


class GrpcService(ABC):
    """Services besides the engine's own, or an address besides its socket.

    Attributes:
        remote: Whether clients may be on other machines.
    """

    __slots__ = ()
    remote: ClassVar[bool] = False

    @abstractmethod
    def add_to(self, server: grpc.Server) -> None:
        """Add services and addresses to a server that is not started yet.

        Raises:
            TgiError: They cannot be served.
        """

    def drain(self) -> None:  # noqa: B027
        """Refuse new work from now on; work in progress continues."""

    def end(self, cause: str) -> None:  # noqa: B027
        """End all calls that wait: the engine's loop has ended."""


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """What a service uses of the engine.

    Attributes:
        inbox: Takes the engine's messages.
        info: The engine's effective settings.
        adapters: Adapters that requests may name.
        uds_path: The server's own socket.
    """

    inbox: SimpleQueue[Inbound]
    info: EngineInfo
    adapters: AdapterRegistry
    uds_path: Path


ServiceFactory = Callable[[ServedEngine], GrpcService]
"""Creates a service once the engine exists."""
