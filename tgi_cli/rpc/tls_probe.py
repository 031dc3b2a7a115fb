"""Why a TCP connection does not become a session: what the other end's first bytes tell.

gRPC tries again for ever and does not say whether nobody is there yet, which waiting helps, or
somebody whom TLS keeps apart, which it does not. One connection by hand tells the two apart.
"""

from __future__ import annotations

import asyncio
import socket
import ssl

from tgi_cli.errors import ShardError
from tgi_cli.rpc.endpoint import EngineEndpoint

_SECONDS = 3.0
"""For each step of a look; somebody who is silent may be busy."""
_PAUSE_SECONDS = 0.5
"""Before a look: who is well answers sooner."""
_CLOSED = 3
"""So many connections that are closed without a word are no accident."""

_SETTINGS = b"\0\0\0\4\0\0\0\0\0"
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS
"""How HTTP/2 begins: https://www.rfc-editor.org/rfc/rfc9113#section-3.4"""
_ALERT = 0x15
"""The first byte of TLS's record of an alert."""

_EXPIRED, _EARLY, _UNTRUSTED, _OTHER_NAME = (10,), (9,), (2, 18, 19, 20, 21), (62, 64)
"""OpenSSL's codes of verification: https://docs.openssl.org/3.0/man3/X509_STORE_CTX_get_error"""


class Closed(Exception):
    """The other end took the connection and closed it without a word."""


def watch(endpoint: EngineEndpoint, opened: asyncio.Future[None]) -> asyncio.Task[None]:
    """Have who waits for a session on TCP told why there will be none. To be cancelled.

    Args:
        endpoint: where it waits.
        opened: gets the error.
    """

    async def run() -> None:
        if endpoint.path is None:
            error = await until_hopeless(endpoint)
            if not opened.done():
                opened.set_exception(error)

    return asyncio.create_task(run(), name="probe")


async def until_hopeless(endpoint: EngineEndpoint) -> ShardError:
    """Look now and then until a reason is found that waiting does not remove; returns it."""
    closed = 0
    while True:
        await asyncio.sleep(_PAUSE_SECONDS)
        try:
            found = await asyncio.to_thread(look, endpoint)
            closed = 0
        except Closed:
            closed += 1
            found = _refused(endpoint, "") if closed >= _CLOSED else None
        if found is not None:
            return found


def look(endpoint: EngineEndpoint) -> ShardError | None:
    """One connection; None: all is well, or nobody is there.

    Raises:
        Closed: nothing was said.
    """
    try:
        with socket.create_connection((endpoint.host, endpoint.port), _SECONDS) as connection:
            if endpoint.tls is None:
                return _look_plain(endpoint, connection)
            return _look_tls(endpoint, connection)
    except ConnectionResetError:
        raise Closed from None
    except OSError:  # nobody is there, or says nothing in time
        return None


def _look_plain(endpoint: EngineEndpoint, connection: socket.socket) -> ShardError | None:
    connection.sendall(_HELLO)
    first = connection.recv(1)
    if not first:
        raise Closed
    if first[0] == _ALERT:
        return ShardError(
            f"the model server at {endpoint.url} speaks TLS",
            "say whom to trust with --engine-tls-ca, or give its address as grpcs://",
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
            # TLS 1.3 tells only behind the handshake whether it takes our certificate.
            if not secure.recv(1):
                raise Closed
    except ssl.SSLCertVerificationError as error:
        return _distrusted(endpoint, error, name)
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        raise Closed from None
    except ssl.SSLError as error:
        reason = error.reason or ""
        if "ALERT" in reason:
            return _refused(endpoint, reason.partition("ALERT_")[2].replace("_", " ").lower())
        return ShardError(
            f"the model server at {endpoint.url} speaks no TLS",
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
            return ShardError(f"{whose} is not valid yet", "look at the clocks of both machines")
        case code if code in _OTHER_NAME:
            return ShardError(
                f"{whose} is not for {name}",
                "connect by a name that it has, or say which with --engine-tls-server-name",
            )
        case code if code in _UNTRUSTED:
            given = endpoint.tls.authority
            trusted = "the system's authorities" if given is None else str(given)
            return ShardError(
                f"{whose} is signed by nobody in {trusted}",
                "give the certificate of its authority with --engine-tls-ca",
            )
    return ShardError(f"{whose} cannot be trusted: {error.verify_message}")


def _refused(endpoint: EngineEndpoint, reason: str) -> ShardError:
    where, why = f"the model server at {endpoint.url}", f" ({reason})" if reason else ""
    if endpoint.tls is None:
        return ShardError(
            f"{where} closes the connection without a word",
            "if it speaks TLS, say whom to trust with --engine-tls-ca",
        )
    if endpoint.tls.certificate is None:
        return ShardError(
            f"{where} demands a certificate of its clients{why}",
            "give --engine-tls-cert and --engine-tls-key",
        )
    return ShardError(
        f"{where} refuses the certificate {endpoint.tls.certificate}{why}",
        "give one that an authority of its --engine-tls-client-ca has signed",
    )
