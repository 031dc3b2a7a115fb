"""TGI's own programs, started as its test suite and its images start them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.tools.server_process import STOP_SECONDS, free_ports, poll, stop
from tgi_cli import demo
from tgi_cli.process.unix_socket import is_listening

pytestmark = pytest.mark.system

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
QUERY = {"inputs": "def read_json(path):", "parameters": {"max_new_tokens": 5}}
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not tmp_path: the path of a socket must be short."""
    with tempfile.TemporaryDirectory(prefix="tgi-test-") as name:
        yield Path(name)


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Start an installed program by its name; each is ended with the test."""
    scripts = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["scripts"]
    started: list[subprocess.Popen[bytes]] = []

    def start(program: str, *arguments: str) -> subprocess.Popen[bytes]:
        module, _, function = scripts[program].partition(":")
        code = (
            f"import sys; from {module} import {function}; sys.argv[0] = {program!r}; {function}()"
        )
        # As TGI's conftest has it.
        variables = {
            "LOG_LEVEL": "info,text_generation_router=debug",
            "PREFILL_CHUNKING": "1",
            "XDG_RUNTIME_DIR": str(folder),
        }
        log = (folder / f"log-{len(started)}").open("wb")
        with log:
            process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        stop(process)


def answers(port: int, process: subprocess.Popen[bytes]) -> list[dict[str, str]]:
    """What POST / answers, once it does."""
    found: list[dict[str, str]] = []

    def ask() -> bool:
        assert process.poll() is None
        try:
            response = httpx.post(f"http://127.0.0.1:{port}/", json=QUERY, timeout=60)
        except httpx.TransportError:
            return False
        if response.status_code == 200:
            found.extend(response.json())
        return bool(found)

    poll(ask, 120.0, f"port {port} answers")
    return found


def test_a_launcher_and_a_second_router_on_its_shard(folder: Path, start: Start) -> None:
    model, shard = str(demo.model_path()), folder / "shard"
    port, second, master = free_ports(3)
    launcher = start(
        "text-generation-launcher",
        *("--model-id", model, "--port", str(port), "--master-port", str(master)),
        *("--shard-uds-path", str(shard), "--dtype", "float32", "--max-input-length", "100"),
        *("--max-total-tokens", "200", "--sharded", "false", "--hostname", "127.0.0.1"),
    )
    wanted = answers(port, launcher)
    assert isinstance(wanted[0]["generated_text"], str)
    info = httpx.get(f"http://127.0.0.1:{port}/info", timeout=60).json()
    assert (info["max_input_tokens"], info["max_total_tokens"]) == (100, 200)
    router = start(
        "text-generation-router",
        *("--tokenizer-name", model, "--master-shard-uds-path", f"{shard}-0"),
        *("--port", str(second), "--max-input-tokens", "50", "--max-batch-size", "3"),
    )
    assert answers(second, router) == wanted
    info = httpx.get(f"http://127.0.0.1:{second}/info", timeout=60).json()
    assert info["max_input_tokens"] == 50
    for process in (router, launcher):
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_SECONDS) == 0
    log = (folder / "log-0").read_text() + (folder / "log-1").read_text()
    assert "--master-port: without --nnodes, no port is opened" in log
    assert "--max-batch-size: the model server decides that" in log
    assert "Traceback" not in log
    assert {path.name for path in folder.iterdir()} == {"log-0", "log-1"}


def test_a_shard_on_its_own(folder: Path, start: Start) -> None:
    """As TGI's launcher starts it; two of them may run side by side."""
    model = str(demo.model_path())
    shards = [folder / "one", folder / "two"]
    servers = [
        start(
            "text-generation-server",
            *("serve", model, "--uds-path", str(shard), "--dtype", "float32"),
            *("--logger-level", "INFO", "--json-output", "--no-trust-remote-code"),
            *("--otlp-service-name", "shard", "--max-input-tokens", "100"),
        )
        for shard in shards
    ]
    for shard, server in zip(shards, servers, strict=True):
        poll(
            lambda s=shard, p=server: p.poll() is not None or is_listening(Path(f"{s}-0")),  # type: ignore[misc]
            120.0,
            "the socket is there",
        )
        assert server.poll() is None, (folder / "log-0").read_text()
    for server in servers:
        server.send_signal(signal.SIGTERM)
        assert server.wait(STOP_SECONDS) == 0
    assert {path.name for path in folder.iterdir()} == {"log-0", "log-1"}
