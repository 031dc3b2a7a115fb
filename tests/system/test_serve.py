"""``tgi serve`` from the ready line to the end, however it comes, with nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.system.conftest import StartServer
from tests.tools.checkpoints import make_llama
from tests.tools.process_tree import is_gone
from tests.tools.server_process import ServerProcess, poll
from tgi_cli import demo
from tgi_cli.errors import ExitCode

pytestmark = pytest.mark.system

LONG = {"inputs": "def read_json(path):", "parameters": {"max_new_tokens": 900}}


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a native stream."""
    for line in response.iter_lines():
        if line.startswith("data:"):
            yield json.loads(line.removeprefix("data:"))


def assert_nothing_is_left(server: ServerProcess, children: list[int]) -> None:
    assert all(is_gone(pid) for pid in children)
    assert list(server.runtime.iterdir()) == []


def errors_in(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith("error:")]


@pytest.mark.tgi_pain(3)
def test_the_bundled_model_is_served_and_said_so(server: ServerProcess) -> None:
    assert f"no model named: serving the bundled miniature model, {demo.MODEL_ID}" in server.log
    poll(lambda: server.log.count("ready: ") == 2, 60, "the launcher and the model server are")
    body = LONG | {"parameters": {"max_new_tokens": 5}}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    assert answer.status_code == 200
    assert answer.json()["generated_text"]


def test_the_line_to_try_works_as_it_is(server: ServerProcess) -> None:
    poll(lambda: "\n  curl " in server.log, 60, "the line comes, behind the ready line")
    line = next(line for line in server.log.splitlines() if line.strip().startswith("curl "))
    done = subprocess.run(["bash", "-c", f"{line} -sS"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["generated_text"]


def test_a_chat_without_settings_is_answered(server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "How do I open a file?"}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert "with open(path" in choice["message"]["content"]


def test_the_runtime_folder_is_private(server: ServerProcess) -> None:
    (folder,) = server.runtime.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "engine.sock").stat().st_mode & 0o777 == 0o600


def test_the_same_port_again_is_an_error_at_once(server: ServerProcess, tmp_path: Path) -> None:
    port = str(urlsplit(server.url).port)
    done = subprocess.run(
        [sys.executable, "-m", "tgi_cli", "serve", "--hostname", "127.0.0.1", "--port", port],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == ExitCode.ADDRESS_IN_USE
    assert done.stderr.splitlines()[0] == f"error: port {port} is in use"


def test_sigterm_lets_a_stream_finish_and_leaves_nothing(start_server: StartServer) -> None:
    server = start_server()
    server.wait_ready()
    children = server.children()
    assert len(children) == 2
    url = server.url
    with httpx.stream("POST", f"{url}/generate_stream", json=LONG, timeout=60) as response:
        stream = events(response)
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        rest = list(stream)
    assert len(rest) > 2
    assert not any("error" in event for event in rest)
    assert rest[-1]["generated_text"]
    assert server.wait() == ExitCode.OK
    assert errors_in(server.log) == []
    assert_nothing_is_left(server, children)
    address = urlsplit(url)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.hostname, address.port), timeout=5)


def test_ctrl_c_ends_it_in_order(start_server: StartServer) -> None:
    server = start_server("--json-output")
    poll(lambda: '"ready: ' in server.log, 120, "the ready line comes")
    poll(lambda: server.log.count('"ready: ') == 2, 120, "the launcher's ready line comes")
    children = server.children()
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.wait() == ExitCode.OK
    assert_nothing_is_left(server, children)
    for line in server.log.splitlines():
        assert json.loads(line)["level"] in ("INFO", "WARNING"), line


def test_ctrl_c_while_it_loads_is_no_failure(start_server: StartServer) -> None:
    server = start_server()
    poll(lambda: len(server.children()) == 2, 60, "the children start")
    children = server.children()
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.wait() == ExitCode.OK
    assert errors_in(server.log) == []
    assert_nothing_is_left(server, children)


def test_ctrl_c_while_it_downloads_is_no_failure(start_server: StartServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:  # which never answers
        hub.settimeout(60)
        address = f"http://127.0.0.1:{hub.getsockname()[1]}"
        server = start_server("org/model", HF_ENDPOINT=address, HF_HUB_OFFLINE="0")
        connection, _ = hub.accept()
        with connection:
            os.killpg(server.process.pid, signal.SIGINT)
            assert server.wait() == ExitCode.OK
    assert errors_in(server.log) == []
    assert "Traceback" not in server.log


def test_a_killed_launcher_leaves_no_orphan(start_server: StartServer) -> None:
    server = start_server()
    server.wait_ready()
    children = server.children()
    with httpx.stream("POST", f"{server.url}/generate_stream", json=LONG, timeout=60) as response:
        next(events(response))
        server.process.kill()
        server.process.wait()
        poll(lambda: all(is_gone(pid) for pid in children), 60, "the children end")
    assert_nothing_is_left(server, children)


def test_a_killed_launcher_leaves_no_orphan_while_it_loads(start_server: StartServer) -> None:
    server = start_server()
    poll(lambda: len(server.children()) == 2, 60, "the children start")
    children = server.children()
    server.process.kill()
    server.process.wait()
    poll(lambda: all(is_gone(pid) for pid in children), 60, "the children end")
    assert_nothing_is_left(server, children)


def test_what_the_model_server_refuses_is_said_once(start_server: StartServer) -> None:
    server = start_server("--max-total-tokens", "1000000")
    assert server.wait() == ExitCode.USAGE
    (line,) = errors_in(server.log)
    assert "--max-total-tokens 1000000" in line
    assert "Traceback" not in server.log
    assert list(server.runtime.iterdir()) == []


def test_an_architecture_that_is_not_known_is_named(
    start_server: StartServer, tmp_path: Path
) -> None:
    for path in demo.model_path().iterdir():
        if path.is_file():
            (tmp_path / path.name).symlink_to(path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["NoSuchForCausalLM"], "model_type": "nosuch"}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    server = start_server(str(tmp_path))
    assert server.wait() == ExitCode.MODEL_UNUSABLE
    assert any("NoSuchForCausalLM" in line or "nosuch" in line for line in errors_in(server.log))
    assert "Traceback" not in server.log


def test_dummy_weights_are_served_from_a_configuration_alone(
    start_server: StartServer, tmp_path: Path
) -> None:
    make_llama(tmp_path / "model", tokenizer=demo.model_path(), vocab_size=4096)
    (tmp_path / "model" / "model.safetensors").unlink()
    server = start_server(str(tmp_path / "model"), "--load-format", "dummy")
    server.wait_ready()
    answer = httpx.post(
        f"{server.url}/generate",
        json={"inputs": "def", "parameters": {"max_new_tokens": 5}},
        timeout=60,
    )
    assert answer.status_code == 200
    assert answer.json()["generated_text"]
