"""The HTTP port, bound before anything slow happens, so that a taken port is an error at once."""

from __future__ import annotations

import errno
import socket

from tgi_cli.errors import AddressInUseError, ConfigError


def bind(hostname: str, port: int) -> socket.socket:
    """A TCP socket that is bound and does not listen yet; ``port`` 0 takes a free one.

    Raises:
        AddressInUseError: the port is taken, or may not be bound.
        ConfigError: ``hostname`` is no name or address of this machine.
    """
    try:
        found = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--hostname {hostname!r} is neither an address nor a name that resolves",
            "0.0.0.0 listens on all addresses, 127.0.0.1 on this machine only",
        ) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    # A port whose last server has just gone may be taken over; one that is served may not.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _explained(error, hostname, port) from error
    return listener


def _explained(error: OSError, hostname: str, port: int) -> AddressInUseError | ConfigError:
    if error.errno == errno.EADDRINUSE:
        return AddressInUseError(
            f"port {port} is in use", "stop what listens there, or choose another with --port"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return AddressInUseError(
            f"this user may not listen on port {port}", "choose a port above 1023 with --port"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(
            f"--hostname {hostname} is not an address of this machine",
            "0.0.0.0 listens on all of them",
        )
    return AddressInUseError(f"cannot listen on {hostname}:{port}: {error.strerror}")


def local_address(listener: socket.socket) -> tuple[str, int]:
    """Host and port under which this machine reaches the listener."""
    host, port = listener.getsockname()[:2]
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port


def url(host: str, port: int, tls: bool = False) -> str:
    """The address as a URL; IPv6 addresses in brackets (RFC 3986)."""
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
