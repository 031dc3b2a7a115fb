"""Finds out why a TCP connection does not become a session.

gRPC retries forever and does not report whether the other end is not there yet, or refuses TLS,
where waiting does not help. The first bytes of a plain connection show which it is.
"""

from __future__ import annotations

import asyncio
import socket
import ssl

from tgi_cli.errors import ShardError
from tgi_cli.rpc.endpoint import EngineEndpoint

_SECONDS = 3.0
"""Timeout of each step of a probe; a silent peer may be busy."""
_PAUSE_SECONDS = 0.5
"""Pause before a probe: a healthy peer answers sooner."""
_MAX_CLOSED = 3
"""Connections closed without data before that counts as a refusal."""

_SETTINGS = b"\0\0\0\4\0\0\0\0\0"
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS
"""The connection preface of HTTP/2: https://www.rfc-editor.org/rfc/rfc9113#section-3.4"""
_ALERT = 0x15
"""The first byte of a TLS alert."""

_EXPIRED, _EARLY, _UNTRUSTED, _OTHER_NAME = (10,), (9,), (2, 18, 19, 20, 21), (62, 64)
"""OpenSSL's codes of verification: https://docs.openssl.org/3.0/man3/X509_STORE_CTX_get_error"""


class ConnectionClosed(Exception):
    """The other end accepted the connection and closed it without data."""


def watch(endpoint: EngineEndpoint, opened: asyncio.Future[None]) -> asyncio.Task[None]:
    """Probe a TCP endpoint until the task is cancelled or the session is known to be impossible.

    Args:
        endpoint: The model server.
        opened: Gets the error.
    """

    async def run() -> None:
        if endpoint.path is None:
            error = await until_hopeless(endpoint)
            if not opened.done():
                opened.set_exception(error)

    return asyncio.create_task(run(), name="probe")


async def until_hopeless(endpoint: EngineEndpoint) -> ShardError:
    """Probe repeatedly; return the error once waiting does not help."""
    closed = 0
    while True:
        await asyncio.sleep(_PAUSE_SECONDS)
        try:
            found = await asyncio.to_thread(look, endpoint)
            closed = 0
        except ConnectionClosed:
            closed += 1
            found = _refused(endpoint, "") if closed >= _MAX_CLOSED else None
        if found is not None:
            return found


def look(endpoint: EngineEndpoint) -> ShardError | None:
    """Probe once; return an error, or None if the peer is healthy or absent.

    Raises:
        ConnectionClosed: The peer closed the connection without data.
    """
    try:
        with socket.create_connection((endpoint.host, endpoint.port), _SECONDS) as connection:
            if endpoint.tls is None:
                return _look_plain(endpoint, connection)
            return _look_tls(endpoint, connection)
    except ConnectionResetError:
        raise ConnectionClosed from None
    except OSError:  # nothing listens there, or it does not answer in time
        return None


def _look_plain(endpoint: EngineEndpoint, connection: socket.socket) -> ShardError | None:
    connection.sendall(_HELLO)
    first = connection.recv(1)
    if not first:
        raise ConnectionClosed
    if first[0] == _ALERT:
        return ShardError(
            f"the model server at {endpoint.url} requires TLS",
            "give its authority with --engine-tls-ca, or its address as grpcs://",
        )
    return None


def _look_tls(endpoint: EngineEndpoint, connection: socket.socket) -> ShardError | None:
    assert endpoint.tls is not None
    context = endpoint.tls.context(server=False)
    context.set_alpn_protocols(["h2"])
    name = endpoint.tls.server_name or endpoint.host
    try:
        with context.wrap_socket(connection, server_hostname=name) as secure:
            secure.sendall(_HELLO)
            # With TLS 1.3 the peer refuses our certificate only after the handshake.
            if not secure.recv(1):
                raise ConnectionClosed
    except ssl.SSLCertVerificationError as error:
        return _distrusted(endpoint, error, name)
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        raise ConnectionClosed from None
    except ssl.SSLError as error:
        reason = error.reason or ""
        if "ALERT" in reason:
            return _refused(endpoint, reason.partition("ALERT_")[2].replace("_", " ").lower())
        return ShardError(
            f"the model server at {endpoint.url} does not use TLS",
            "give it a certificate, or leave the --engine-tls flags off and use tcp://",
        )
    return None


def _distrusted(
    endpoint: EngineEndpoint, error: ssl.SSLCertVerificationError, name: str
) -> ShardError:
    assert endpoint.tls is not None
    whose = f"the certificate of the model server at {endpoint.url}"
    match error.verify_code:
        case code if code in _EXPIRED:
            return ShardError(f"{whose} has expired", "have a new one issued there")
        case code if code in _EARLY:
            return ShardError(f"{whose} is not valid yet", "check the clocks of both machines")
        case code if code in _OTHER_NAME:
            return ShardError(
                f"{whose} is not for {name}",
                "connect by a name in it, or give one with --engine-tls-server-name",
            )
        case code if code in _UNTRUSTED:
            given = endpoint.tls.authority
            trusted = "the system's authorities" if given is None else str(given)
            return ShardError(
                f"{whose} is not signed by an authority of {trusted}",
                "give the certificate of its authority with --engine-tls-ca",
            )
    return ShardError(f"{whose} cannot be trusted: {error.verify_message}")


def _refused(endpoint: EngineEndpoint, reason: str) -> ShardError:
    where, why = f"the model server at {endpoint.url}", f" ({reason})" if reason else ""
    if endpoint.tls is None:
        return ShardError(
            f"{where} closes the connection without data",
            "if it uses TLS, give its authority with --engine-tls-ca",
        )
    if endpoint.tls.certificate is None:
        return ShardError(
            f"{where} requires client certificates{why}",
            "give --engine-tls-cert and --engine-tls-key",
        )
    return ShardError(
        f"{where} refuses the certificate {endpoint.tls.certificate}{why}",
        "give one that an authority of its --engine-tls-client-ca has signed",
    )
