"""A port is bound at the start; failures have a cause and a remedy."""

from __future__ import annotations

import socket

import pytest

from tgi_cli.errors import AddressInUseError, ConfigError, ExitCode
from tgi_cli.process import bind


def test_a_bound_port_does_not_answer_yet_and_may_be_listened_on() -> None:
    with bind.bind("127.0.0.1", 0) as sock:
        address = bind.local_address(sock)
        assert address[1] != 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        sock.listen()
        socket.create_connection(address, timeout=5).close()


def test_a_served_port_is_an_error_with_its_own_code() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(AddressInUseError, match=f"port {port} is in use") as caught:
            bind.bind("127.0.0.1", port)
    assert caught.value.exit_code is ExitCode.ADDRESS_IN_USE
    assert "--port" in caught.value.remedy


def test_a_port_can_be_reused_at_once() -> None:
    with bind.bind("127.0.0.1", 0) as sock:
        sock.listen()
        address = bind.local_address(sock)
        client = socket.create_connection(address, timeout=5)
        accepted, _ = sock.accept()
        accepted.close()  # the server closes first: its side of the connection lingers
        client.close()
    bind.bind(*address).close()


@pytest.mark.parametrize("hostname", ["no such host", "203.0.113.7", "x" * 300])
def test_an_address_of_another_machine_is_an_error(hostname: str) -> None:
    with pytest.raises(ConfigError, match="--hostname"):
        bind.bind(hostname, 0)


def test_the_reported_address_can_be_opened() -> None:
    with bind.bind("0.0.0.0", 0) as sock:
        host, port = bind.local_address(sock)
    assert host == "127.0.0.1"
    assert bind.url(host, 80) == "http://127.0.0.1:80"
    assert bind.url("::1", 80) == "http://[::1]:80"
    assert port > 0


@pytest.mark.parametrize(
    ("hostname", "key", "origins", "named"),
    [
        ("0.0.0.0", None, (), ["--hostname 127.0.0.1", "--api-key", "--cors-allow-origin"]),
        ("::", None, (), ["--hostname 127.0.0.1", "--api-key", "--cors-allow-origin"]),
        ("10.0.0.7", None, ("https://a.example",), ["--hostname 127.0.0.1", "--api-key"]),
        ("127.0.0.1", None, (), None),
        ("::1", None, (), None),
        ("localhost", None, (), None),
        ("0.0.0.0", "secret", (), None),
    ],
)
def test_an_open_server_is_warned_of_in_one_line(
    hostname: str,
    key: str | None,
    origins: tuple[str, ...],
    named: list[str] | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bind.warn_if_open(hostname, 3000, key, origins)
    flags = ("--hostname 127.0.0.1", "--api-key", "--cors-allow-origin")
    if named is None:
        assert caplog.messages == []
        return
    (message,) = caplog.messages
    assert message.startswith("port 3000 is open to all machines")
    assert "without a key" in message
    assert [flag for flag in flags if flag in message] == named
