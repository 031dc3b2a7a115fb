"""Channels between machines whose ends have proved to each other that they know a secret.

Each end sends a random number and an HMAC (RFC 2104) of both numbers under the secret; the client
first, so that a stranger gets nothing to try secrets on. Every message is followed by an HMAC of
its number and content, under a key of this connection and direction: one that was changed,
repeated, left out or inserted on the way ends the connection. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from pathlib import Path

from tgi_cli.errors import ConfigError
from tgi_cli.files import read_text
from tgi_cli.process.framing import Channel, encode_frame

MIN_SECRET = 16
"""Characters that a secret has at least."""

MESSAGE_BYTES = 4 << 20
"""Limit of a message unless another one is set: its length is read before it is authenticated."""

_MAGIC = b"tgi channel 1\n"
_RANDOM_BYTES = 32
_PROOF_BYTES = 32
_TAG_BYTES = 16
_REFUSAL = bytes(_PROOF_BYTES)
_SECRET_FILE_BYTES = 4096
_NUMBER = struct.Struct("<Q")


class AuthenticationError(Exception):
    """The other end does not know the secret, or speaks another protocol."""


class AuthenticatedChannel(Channel):
    """One end of a connection between machines; made by :func:`accept` and :func:`connect`.

    :meth:`receive` raises ValueError for a message that the other end has not sent so, and for
    one that is larger than :attr:`limit`, by default :data:`MESSAGE_BYTES`.
    """

    def __init__(self, connection: socket.socket, own_key: bytes, other_key: bytes) -> None:
        super().__init__(connection, MESSAGE_BYTES)
        self._own_key = own_key
        self._other_key = other_key
        self._sent = 0
        self._received = 0

    @property
    def own_address(self) -> str:
        """The address by which the other end reaches this machine."""
        return str(self._socket.getsockname()[0])

    @property
    def other_address(self) -> str:
        """The other end's address, without its port."""
        return str(self._socket.getpeername()[0])

    def send(self, message: bytes) -> None:
        with self._sending:
            tag = _tag(self._own_key, self._sent, message)
            self._sent += 1
            self._socket.sendall(encode_frame(message) + tag)

    def receive(self) -> bytes | None:
        message = super().receive()
        tag = None if message is None else self._read(_TAG_BYTES)
        if message is None or tag is None:
            return None
        if not hmac.compare_digest(tag, _tag(self._other_key, self._received, message)):
            raise ValueError("the message was changed on its way")
        self._received += 1
        return message

    def set_timeout(self, seconds: float | None) -> None:
        """Limit how long :meth:`receive` waits; it raises TimeoutError then."""
        self._socket.settimeout(seconds)


def accept(connection: socket.socket, secret: bytes, seconds: float) -> AuthenticatedChannel:
    """Authenticate a client, within ``seconds``.

    Raises:
        AuthenticationError: It does not know the secret.
        OSError: The connection has failed, or the time is up.
    """
    end = time.monotonic() + seconds
    own = secrets.token_bytes(_RANDOM_BYTES)
    connection.settimeout(seconds)
    connection.sendall(_MAGIC + own)
    hello = _receive(connection, len(_MAGIC) + _RANDOM_BYTES + _PROOF_BYTES, end)
    magic, other, proof = _split(hello, len(_MAGIC), _RANDOM_BYTES)
    if magic != _MAGIC:
        raise AuthenticationError("it speaks another protocol")
    if not hmac.compare_digest(proof, _proof(secret, b"client", own, other)):
        connection.sendall(_REFUSAL)
        raise AuthenticationError("it has another secret")
    connection.sendall(_proof(secret, b"server", own, other))
    return _channel(connection, secret, own + other, (b"to client", b"to server"))


def connect(host: str, port: int, secret: bytes, seconds: float) -> AuthenticatedChannel:
    """Connect to a server, and authenticate it, within ``seconds``.

    Raises:
        AuthenticationError: It does not know the secret.
        OSError: It cannot be reached, or the time is up.
    """
    end = time.monotonic() + seconds
    connection = socket.create_connection((host, port), seconds)
    try:
        hello = _receive(connection, len(_MAGIC) + _RANDOM_BYTES, end)
        magic, other = _split(hello, len(_MAGIC))
        if magic != _MAGIC:
            raise AuthenticationError("it speaks another protocol")
        own = secrets.token_bytes(_RANDOM_BYTES)
        connection.sendall(_MAGIC + own + _proof(secret, b"client", other, own))
        proof = _receive(connection, _PROOF_BYTES, end)
        if not hmac.compare_digest(proof, _proof(secret, b"server", other, own)):
            raise AuthenticationError("it has another secret")
        return _channel(connection, secret, other + own, (b"to server", b"to client"))
    except BaseException:
        connection.close()
        raise


def read_secret(file: Path) -> bytes:
    """Read a secret from a file, without white space around it.

    Raises:
        ConfigError: The file cannot be read, others may write to it, or the secret is too short.
    """
    try:
        writable = file.stat().st_mode & 0o022
        secret = read_text(file, _SECRET_FILE_BYTES).strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--node-secret-file {file} cannot be read: {reason}", "give a readable file"
        ) from error
    if writable:
        raise ConfigError(
            f"--node-secret-file {file} may be written by other users", f"chmod 600 {file}"
        )
    if len(secret) < MIN_SECRET:
        raise ConfigError(
            f"the secret of --node-secret-file {file} is shorter than {MIN_SECRET} characters",
            "make one: openssl rand -hex 32",
        )
    return secret.encode()


def _channel(
    connection: socket.socket, secret: bytes, numbers: bytes, directions: tuple[bytes, bytes]
) -> AuthenticatedChannel:
    """The channel of a connection whose own direction is the first one."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    own, other = (hmac.digest(secret, direction + numbers, "sha256") for direction in directions)
    return AuthenticatedChannel(connection, own, other)


def _proof(secret: bytes, role: bytes, server: bytes, client: bytes) -> bytes:
    return hmac.digest(secret, _MAGIC + role + server + client, "sha256")


def _tag(key: bytes, number: int, message: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + message, "sha256")[:_TAG_BYTES]


def _receive(connection: socket.socket, size: int, end: float) -> bytes:
    """Receive ``size`` bytes until ``end``, a time of ``time.monotonic()``."""
    data = b""
    while len(data) < size:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other end is silent")
        connection.settimeout(left)
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the other end has closed the connection")
        data += part
    return data


def _split(data: bytes, *sizes: int) -> list[bytes]:
    """Cut data into parts of these sizes, and the rest."""
    parts = []
    for size in sizes:
        parts.append(data[:size])
        data = data[size:]
    return [*parts, data]
