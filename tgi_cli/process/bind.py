"""TCP ports, bound before anything slow happens, so that a taken port is an error at once."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket

from tgi_cli.errors import AddressInUseError, ConfigError

log = logging.getLogger(__name__)


def bind(
    hostname: str, port: int, host_flag: str = "--hostname", port_flag: str = "--port"
) -> socket.socket:
    """Bind a TCP socket, which does not listen yet; ``port`` 0 takes a free one.

    The flags are those that errors name.

    Raises:
        AddressInUseError: The port is taken, or may not be bound.
        ConfigError: ``hostname`` is not a name or address of this machine.
    """
    try:
        found = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{host_flag} {hostname!r} is neither an address nor a name that resolves",
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
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"{host_flag} {hostname} is not an address of this machine",
                "0.0.0.0 listens on all of them",
            ) from error
        raise _unavailable(error, hostname, port, port_flag) from error
    return listener


def bind_or_adopt(hostname: str, port: int, fd: int | None) -> socket.socket:
    """Return the bound socket that this process has inherited as ``fd``, or bind one.

    Raises:
        ConfigError: ``fd`` is not a socket; or as :func:`bind`.
        AddressInUseError: See :func:`bind`.
    """
    if fd is None:
        return bind(hostname, port)
    try:
        listener = socket.socket(fileno=fd)
    except OSError as error:
        raise ConfigError(f"descriptor {fd} is not a socket: {error.strerror}") from error
    listener.set_inheritable(False)
    return listener


def _unavailable(error: OSError, hostname: str, port: int, flag: str) -> AddressInUseError:
    if error.errno == errno.EADDRINUSE:
        cause = f"port {port} is in use"
        return AddressInUseError(cause, f"stop what listens there, or choose another with {flag}")
    if error.errno in (errno.EACCES, errno.EPERM):
        cause = f"this user may not listen on port {port}"
        return AddressInUseError(cause, f"choose a port above 1023 with {flag}")
    address = format_address(hostname, port)
    return AddressInUseError(f"cannot listen on {address}: {error.strerror or error}")


def local_address(listener: socket.socket) -> tuple[str, int]:
    """Return host and port under which this machine reaches the listener."""
    host, port = listener.getsockname()[:2]
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port


def format_address(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with brackets around an IPv6 address (RFC 3986)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url(host: str, port: int, tls: bool = False) -> str:
    """Return the address as a URL."""
    return f"{'https' if tls else 'http'}://{format_address(host, port)}"


def warn_if_open(hostname: str, port: int, key: str | None, origins: tuple[str, ...]) -> None:
    """Warn if other machines may use the model without a key, and name what limits that.

    Args:
        hostname: The address that the server listens on.
        key: The API keys, or None.
        origins: Origins whose pages may send requests; empty: all.
    """
    if key is not None or _is_loopback(hostname):
        return
    pages, limit = ("", "") if origins else (" and web pages", ", --cors-allow-origin")
    log.warning(
        "port %d is open to all machines%s without a key: --api-key, --hostname 127.0.0.1%s",
        port,
        pages,
        limit,
    )


def _is_loopback(hostname: str) -> bool:
    try:
        return ipaddress.ip_address(hostname).is_loopback
    except ValueError:
        return hostname == "localhost"
