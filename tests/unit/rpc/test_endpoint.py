"""Addresses of a model server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.certificate_authority import Authority
from tgi_cli.errors import ConfigError
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
def test_addresses_are_parsed(url: str, target: str, path: Path | None) -> None:
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
def test_invalid_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"not an address|names no socket"):
        EngineEndpoint.parse(url)


def test_tls_files_apply_to_tcp_only(tmp_path: Path) -> None:
    files = TlsFiles(authority=Authority(tmp_path).certificate)
    endpoint = EngineEndpoint.parse("tcp://gpu-7:1", files)
    assert endpoint.tls == files
    assert endpoint.url == "grpcs://gpu-7:1"
    with pytest.raises(ConfigError, match="needs no TLS"):
        EngineEndpoint.parse("unix:/run/x", files)
