"""What a user can get wrong: one line of cause, one of remedy, a code of its own, no traceback."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tgi_cli import demo
from tgi_cli.errors import ExitCode

NOISE = ("MODEL_ID", "PORT", "HOSTNAME", "JSON_OUTPUT", "LOG_LEVEL", "TGI_TRACEBACK")


def tgi(
    *arguments: str, home: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    kept = {name: value for name, value in os.environ.items() if name not in NOISE}
    if home is not None:
        kept |= {"HF_HOME": str(home), "XDG_RUNTIME_DIR": str(home)}
    return subprocess.run(
        [sys.executable, "-m", "tgi_cli", *arguments],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def assert_error(
    done: subprocess.CompletedProcess[str], code: ExitCode, cause: str, remedy: str
) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("error:"))
    said = lines[first:]
    assert cause in said[0]
    assert len(said) <= 2
    assert remedy in (said[1] if len(said) > 1 else "")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "cause", "remedy"),
    [
        (["serve", "--port", "abc"], "'abc' is not a whole number", "tgi serve --help"),
        (["serve", "--port", "70000"], "70000 is not from 0 to 65535", "tgi serve --help"),
        (["serve", "--max-batch-size", "0"], "0 is not at least 1", "tgi serve --help"),
        (["serve", "--dtype", "int3"], "'int3' is not one of", "tgi serve --help"),
        (["serve", "--logger-level", "loud"], "unknown log level 'loud'", ""),
        (["serve", "--prot", "1"], "--port", "tgi serve --help"),
        (["srve"], "Did you mean 'serve'", "tgi --help"),
        (["serve", "a", "--model-id", "b"], "name a model", "one of them"),
        (["serve", "--hostname", "no such host"], "--hostname", "0.0.0.0"),
        (
            ["serve", "--max-input-tokens", "3", "--max-input-length", "3"],
            "two names of one limit",
            "MAX_INPUT_LENGTH",
        ),
    ],
)
def test_invalid_command_lines_are_usage_errors(
    arguments: list[str], cause: str, remedy: str
) -> None:
    assert_error(tgi(*arguments), ExitCode.USAGE, cause, remedy)


def test_impossible_limits_are_found_before_anything_starts() -> None:
    done = tgi("serve", "--max-input-tokens", "10", "--max-total-tokens", "5", "--port", "0")
    assert_error(done, ExitCode.USAGE, "must be less than --max-total-tokens 5", "raise the latter")
    assert "loading" not in done.stderr


def test_an_invalid_variable_is_named() -> None:
    done = tgi("serve", MAX_BATCH_SIZE="many")
    assert_error(done, ExitCode.USAGE, "'many' is not a whole number", "MAX_BATCH_SIZE")


def test_a_flag_beats_its_variable() -> None:
    assert_error(tgi("serve", "--port", "abc", PORT="80"), ExitCode.USAGE, "'abc'", "--help")


def test_a_port_in_use_is_reported_before_loading(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = tgi("serve", "--hostname", "127.0.0.1", "--port", str(port), home=tmp_path)
    assert_error(done, ExitCode.ADDRESS_IN_USE, f"port {port} is in use", "--port")
    assert "loading" not in done.stderr


def test_an_empty_folder_is_an_unusable_model(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    done = tgi("serve", str(empty), "--port", "0", home=tmp_path)
    assert_error(done, ExitCode.MODEL_UNUSABLE, "is empty", "config.json")


def test_a_missing_folder_is_an_unavailable_model(tmp_path: Path) -> None:
    done = tgi("serve", str(tmp_path / "nowhere"), "--port", "0", home=tmp_path)
    assert_error(done, ExitCode.MODEL_UNAVAILABLE, "nowhere", "")


def test_truncated_weights_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(demo.model_path(), broken)
    weights = broken / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    done = tgi("serve", str(broken), "--port", "0", home=tmp_path)
    assert done.returncode in (ExitCode.MODEL_UNAVAILABLE, ExitCode.MODEL_UNUSABLE)
    assert_error(done, ExitCode(done.returncode), "model.safetensors", "")


class _NoSuchModel(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("X-Error-Message", "Repository not found")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _NoSuchModel) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_unknown_model_is_unavailable(tmp_path: Path, hub: str) -> None:
    done = tgi("serve", "nobody/nothing", "--port", "0", home=tmp_path, HF_ENDPOINT=hub)
    assert_error(done, ExitCode.MODEL_UNAVAILABLE, "nobody/nothing", "")


def test_json_logs_give_json_errors() -> None:
    done = tgi("serve", "--json-output", "--hostname", "no such host")
    assert done.returncode == ExitCode.USAGE
    line = json.loads(done.stderr)
    assert line["level"] == "ERROR"
    assert "no such host" in line["fields"]["message"]
    assert "0.0.0.0" in line["fields"]["remedy"]


@pytest.mark.parametrize("how", [["--traceback"], []])
def test_a_traceback_is_printed_on_request(how: list[str]) -> None:
    environment = {} if how else {"TGI_TRACEBACK": "1"}
    done = tgi(*how, "serve", "--hostname", "no such host", **environment)
    assert done.returncode == ExitCode.USAGE
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-2].startswith("error:")


def test_a_socket_in_a_shared_folder_is_rejected_before_loading(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o755)
    done = tgi("model-server", "--uds-path", str(tmp_path / "s"), home=tmp_path)
    assert_error(done, ExitCode.USAGE, "other users", "0700")


def test_a_childs_configuration_is_refused_without_a_parent(tmp_path: Path) -> None:
    done = tgi("router", "--config-fd", "999", home=tmp_path)
    assert_error(done, ExitCode.USAGE, "--config-fd", "leave it off")


def test_a_router_without_a_model_server_names_the_remedy(tmp_path: Path) -> None:
    command = ["router", "--hostname", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(
        [sys.executable, "-m", "tgi_cli", *command],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            waiting = next((line for line in process.stderr if "waiting for" in line), "")
            assert "`tgi model-server MODEL` starts one" in waiting
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == ExitCode.OK
        finally:
            process.kill()
