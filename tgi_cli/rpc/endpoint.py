"""The address of a model server."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tgi_cli.errors import ConfigError
from tgi_cli.process.bind import format_address
from tgi_cli.rpc.tls import TlsFiles

if TYPE_CHECKING:
    import grpc
    import grpc.aio

_PLAIN = ("tcp", "grpc")
_FORMS = "give unix:/PATH, tcp://HOST:PORT, or grpcs://HOST:PORT for TLS"


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """A model server's address. Create it with :meth:`parse`.

    Attributes:
        target: In gRPC's notation.
        path: Path of a unix socket, or None for TCP.
        host, port: For TCP.
        tls: TLS files for TCP, or None for an unencrypted connection.
    """

    target: str
    path: Path | None = None
    host: str = ""
    port: int = 0
    tls: TlsFiles | None = None

    @classmethod
    def parse(cls, url: str, tls: TlsFiles | None = None) -> EngineEndpoint:
        """Parse ``unix:/PATH``, ``/PATH``, ``tcp://HOST:PORT``, ``HOST:PORT`` or ``grpcs://...``.

        With ``tls``, TCP connections use TLS; ``grpcs://`` uses it with the system's authorities
        otherwise.

        Raises:
            ConfigError: The address is invalid, or the TLS files are unusable.
        """
        if url.startswith(("unix:", "/")):
            path = url.removeprefix("unix:")
            path = path[2:] if path.startswith("//") else path
            if not path:
                raise ConfigError(f"{url!r} names no socket", _FORMS)
            if tls is not None:
                raise ConfigError(
                    f"{url} is a unix socket, which needs no TLS",
                    "leave --engine-tls-ca, -cert, -key and -server-name off",
                )
            return cls(f"unix:{path}", Path(path))
        scheme, host, port = split_tcp(url, "a model server")
        if scheme == "grpcs" and tls is None:
            tls = TlsFiles()
        if tls is not None:
            tls.check(server=False)
        return cls(format_address(host, port), None, host, port, tls)

    @property
    def url(self) -> str:
        """The address for messages."""
        if self.path is not None:
            return self.target
        return f"{'tcp' if self.tls is None else 'grpcs'}://{self.target}"

    def channel(self) -> grpc.Channel:
        """Create a channel for threads."""
        import grpc

        options = self._options()
        if self.tls is None:
            return grpc.insecure_channel(self.target, options=options)
        return grpc.secure_channel(self.target, self.tls.channel_credentials(), options=options)

    def aio_channel(self) -> grpc.aio.Channel:
        """Create a channel for the running event loop."""
        import grpc.aio

        options = self._options()
        if self.tls is None:
            return grpc.aio.insecure_channel(self.target, options=options)
        return grpc.aio.secure_channel(self.target, self.tls.channel_credentials(), options=options)

    def _options(self) -> list[tuple[str, int | str]]:
        from tgi_cli.rpc import channel_options

        chosen = channel_options.TCP_CLIENT if self.path is None else channel_options.CLIENT
        named: dict[str, int | str] = dict(chosen)
        if self.tls is not None and self.tls.server_name is not None:
            named["grpc.ssl_target_name_override"] = self.tls.server_name
        return list(named.items())


def split_tcp(url: str, what: str) -> tuple[str, str, int]:
    """Split ``HOST:PORT``, with or without a scheme, into scheme, host and port.

    Raises:
        ConfigError: The address is invalid; ``what`` is its owner for the message.
    """
    try:
        parts = urlsplit(url if "://" in url else f"tcp://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    else:
        if parts.scheme not in (*_PLAIN, "grpcs") or parts.username or parts.query:
            host = None
        if parts.path not in ("", "/"):
            host = None
    if not host or port is None:
        raise ConfigError(f"{url!r} is not an address of {what}", _FORMS)
    return parts.scheme, host, port


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
