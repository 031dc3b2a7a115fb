"""What else may be served beside the sessions, on the same gRPC server."""

from __future__ import annotations

from typing import Protocol

import grpc


class GrpcService(Protocol):
    """Other services of the same engine.

    Attributes:
        afar: its clients may be on other machines.
    """

    @property
    def afar(self) -> bool: ...

    def add_to(self, server: grpc.Server) -> None:
        """Add them, and addresses of their own if they have any; the server is not started yet.

        Raises:
            TgiError: they cannot be served.
        """
        ...

    def drain(self) -> None:
        """Refuse new work from now on; what is under way goes on."""
        ...

    def end(self, cause: str) -> None:
        """The engine's loop is over: keep nobody waiting."""
        ...
