"""Two ends of a TCP connection, one of which may be a stranger."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tgi_cli.errors import ConfigError
from tgi_cli.process.authenticated_channel import (
    MESSAGE_BYTES,
    AuthenticatedChannel,
    AuthenticationError,
    accept,
    connect,
    read_secret,
)
from tgi_cli.process.framing import encode_frame

SECRET = b"0123456789abcdef"
SECONDS = 60.0

Ends = tuple[AuthenticatedChannel, AuthenticatedChannel]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def accepted(listener: socket.socket) -> Iterator[Callable[[], Future[AuthenticatedChannel]]]:
    """Accept the next connection, in a thread."""
    with ThreadPoolExecutor(1) as threads:

        def begin(seconds: float = SECONDS) -> Future[AuthenticatedChannel]:
            return threads.submit(lambda: accept(listener.accept()[0], SECRET, seconds))

        yield begin


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


@pytest.fixture
def ends(listener: socket.socket, accepted: Callable[..., Future[AuthenticatedChannel]]) -> Ends:
    server = accepted()
    client = connect("127.0.0.1", port_of(listener), SECRET, SECONDS)
    return server.result(SECONDS), client


def test_messages_go_both_ways(ends: Ends) -> None:
    for sender, receiver in (ends, ends[::-1]):
        sender.send(b"one")
        sender.send(b"")
        sender.send(bytes(300_000))
        assert [receiver.receive() for _ in range(3)] == [b"one", b"", bytes(300_000)]
    assert ends[0].other_address == ends[1].own_address == "127.0.0.1"
    ends[0].close()
    assert ends[1].receive() is None


def test_a_length_is_bounded_before_anything_is_authenticated(ends: Ends) -> None:
    sender, receiver = ends
    sender._socket.sendall(struct.pack("<I", 0xFFFF_FFFF))
    with pytest.raises(ValueError, match=f"at most {MESSAGE_BYTES}"):
        receiver.receive()


def test_both_ends_refuse_another_secret(
    listener: socket.socket, accepted: Callable[[], Future[AuthenticatedChannel]]
) -> None:
    server = accepted()
    with pytest.raises(AuthenticationError, match="another secret"):
        connect("127.0.0.1", port_of(listener), SECRET + b"!", SECONDS)
    with pytest.raises(AuthenticationError, match="another secret"):
        server.result(SECONDS)


def test_another_protocol_is_refused(
    listener: socket.socket, accepted: Callable[[], Future[AuthenticatedChannel]]
) -> None:
    server = accepted()
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: there\r\n\r\n" + bytes(100))
        with pytest.raises(AuthenticationError, match="another protocol"):
            server.result(SECONDS)


def test_a_silent_stranger_is_not_waited_for(
    listener: socket.socket, accepted: Callable[..., Future[AuthenticatedChannel]]
) -> None:
    server = accepted(0.1)
    with socket.create_connection(listener.getsockname()) as stranger:
        assert stranger.recv(100)
        with pytest.raises(TimeoutError):
            server.result(SECONDS)


def test_a_server_that_does_not_know_the_secret_is_refused(listener: socket.socket) -> None:
    """It repeats what it gets: a proof of its own is another one."""

    def echo() -> None:
        connection, _ = listener.accept()
        connection.sendall(b"tgi channel 1\n" + bytes(32))
        connection.sendall(connection.recv(200)[-32:])

    thread = threading.Thread(target=echo)
    thread.start()
    with pytest.raises(AuthenticationError, match="another secret"):
        connect("127.0.0.1", port_of(listener), SECRET, SECONDS)
    thread.join()


@pytest.mark.parametrize("attack", ["change", "repeat", "insert", "reflect"])
def test_messages_of_others_are_refused(ends: Ends, attack: str) -> None:
    server, client = ends
    client.send(b"forget adapter 7")
    raw = server._socket  # as somebody sees it who sits on the way
    size = len(encode_frame(b"forget adapter 7")) + 16
    frame = bytearray(raw.recv(size, socket.MSG_WAITALL))
    on_the_way, other = socket.socketpair()
    server._socket = other
    if attack == "change":
        frame[-17] = ord("8")
    elif attack == "repeat":
        on_the_way.sendall(frame)
        assert server.receive() == b"forget adapter 7"
    elif attack == "insert":
        frame = bytearray(encode_frame(b"forget adapter 8") + bytes(16))
    elif attack == "reflect":
        server.send(b"ping")
        frame = bytearray(on_the_way.recv(200))
    on_the_way.sendall(frame)
    with pytest.raises(ValueError, match="was changed on its way"):
        server.receive()
    for each in (raw, on_the_way, other):
        each.close()


def test_a_file_of_a_secret(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET.decode()}\n")
    file.chmod(0o600)
    assert read_secret(file) == SECRET
    file.chmod(0o666)
    with pytest.raises(ConfigError, match="may be written by other users"):
        read_secret(file)
    file.write_text("short")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="shorter than 16 characters"):
        read_secret(file)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_secret(tmp_path / "missing")
