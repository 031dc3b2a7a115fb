"""How a model server is named, and where it may listen."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.tools.certificate_authority import Authority
from tgi_cli.errors import AddressInUseError, ConfigError
from tgi_cli.model_server.tcp_listener import TcpListener, tcp_listener
from tgi_cli.rpc.endpoint import EngineEndpoint
from tgi_cli.rpc.tls import TlsFiles


@pytest.mark.parametrize(
    ("url", "target", "path"),
    [
        ("unix:/run/tgi/engine.sock", "unix:/run/tgi/engine.sock", Path("/run/tgi/engine.sock")),
        ("unix:///run/x", "unix:/run/x", Path("/run/x")),
        ("/tmp/text-generation-server-0", "unix:/tmp/text-generation-server-0", None),
        ("unix:x", "unix:x", Path("x")),
        ("tcp://10.0.0.1:50051", "10.0.0.1:50051", None),
        ("grpc://gpu-7:1", "gpu-7:1", None),
        ("gpu-7:50051", "gpu-7:50051", None),
        ("tcp://[::1]:50051/", "[::1]:50051", None),
        ("grpcs://gpu-7.example.org:443", "gpu-7.example.org:443", None),
    ],
)
def test_forms_of_an_address(url: str, target: str, path: Path | None) -> None:
    endpoint = EngineEndpoint.parse(url)
    assert endpoint.target == target
    if path is not None:
        assert endpoint.path == path
    assert (endpoint.tls is not None) == url.startswith("grpcs:")
    assert EngineEndpoint.parse(endpoint.url) == endpoint


@pytest.mark.parametrize(
    "url",
    [
        "",
        "unix:",
        "gpu-7",
        "tcp://gpu-7",
        "tcp://:1",
        "tcp://gpu-7:x",
        "tcp://gpu-7:99999",
        "http://gpu-7:3000",
        "tcp://gpu-7:1/path",
        "tcp://me@gpu-7:1",
        "tcp://[::1:5",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match=r"not an address|names no socket"):
        EngineEndpoint.parse(url)


def test_files_make_tcp_speak_tls_and_have_no_place_on_a_unix_socket(tmp_path: Path) -> None:
    files = TlsFiles(authority=Authority(tmp_path).certificate)
    endpoint = EngineEndpoint.parse("tcp://gpu-7:1", files)
    assert endpoint.tls == files
    assert endpoint.url == "grpcs://gpu-7:1"
    with pytest.raises(ConfigError, match="needs no TLS"):
        EngineEndpoint.parse("unix:/run/x", files)


# --------------------------------------------------------------------------- listening


@pytest.mark.parametrize(
    ("url", "more", "said"),
    [
        ("tcp://0.0.0.0:1", {}, "could command the model"),
        ("gpu-7:1", {}, "could command the model"),
        ("tcp://[::]:1", {}, "could command the model"),
        ("tcp://0.0.0.0:1", {"certificate": True}, "could command the model"),
        ("grpcs://127.0.0.1:1", {}, "needs a certificate"),
        ("tcp://127.0.0.1:1", {"client_ca": True}, "no certificate of the server"),
        (None, {"insecure": True}, "need --engine-listen"),
        (None, {"certificate": True}, "need --engine-listen"),
        ("http://127.0.0.1:1", {}, "is not an address of a model server"),
    ],
)
def test_addresses_that_are_refused(
    tmp_path: Path, url: str | None, more: dict[str, bool], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        tcp_listener(url, **_files(tmp_path, more))


@pytest.mark.parametrize(
    ("url", "more"),
    [
        ("tcp://127.0.0.1:1", {}),
        ("localhost:1", {}),
        ("tcp://[::1]:1", {}),
        ("tcp://0.0.0.0:1", {"insecure": True}),
        ("tcp://0.0.0.0:1", {"certificate": True, "insecure": True}),
        ("grpcs://0.0.0.0:1", {"certificate": True, "client_ca": True}),
    ],
)
def test_addresses_that_are_taken(tmp_path: Path, url: str, more: dict[str, bool]) -> None:
    listen = tcp_listener(url, **_files(tmp_path, more))
    assert listen is not None
    assert listen.port == 1
    assert (listen.tls is not None) == ("certificate" in more)


def _files(folder: Path, wanted: dict[str, bool]) -> dict[str, Any]:
    authority = Authority(folder)
    issued = authority.issue("server", "localhost")
    said: dict[str, Any] = {name: yes for name, yes in wanted.items() if name == "insecure"}
    if wanted.get("certificate"):
        said |= {"certificate": issued.certificate, "key": issued.key}
    if wanted.get("client_ca"):
        said["client_ca"] = authority.certificate
    return said


def test_nothing_is_said_and_nothing_listens() -> None:
    assert tcp_listener(None) is None


def test_an_address_that_cannot_be_bound_is_told_before_a_model_is_loaded() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(AddressInUseError, match="is in use"),
    ):
        TcpListener("127.0.0.1", taken.getsockname()[1]).claim()
    with pytest.raises(ConfigError, match="is not an address of this machine"):
        TcpListener("192.0.2.1", 50051).claim()
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid"):
        TcpListener("no-such-host.invalid", 50051).claim()
    TcpListener("127.0.0.1", 0).claim()


def test_who_listens_in_the_clear_for_others_is_warned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Server:
        def add_insecure_port(self, target: str) -> int:
            return int(target.rpartition(":")[2])

    with caplog.at_level(logging.INFO):
        for host, level in (("0.0.0.0", logging.WARNING), ("127.0.0.1", logging.INFO)):
            caplog.clear()
            TcpListener(host, 5).add_to(Server())  # type: ignore[arg-type]
            (record,) = caplog.records
            assert record.levelno == level
            assert record.getMessage() == f"listening on tcp://{host}:5, unencrypted"
