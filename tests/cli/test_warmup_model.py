"""`tgi warmup` of a model and of a running server: what is printed, and for whom."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.tools.checkpoints import make_llama
from tgi_cli.cli import main
from tgi_cli.errors import ExitCode
from tgi_cli.kernels import build
from tgi_cli.worker.sizing import step_timing


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MODEL_ID", "API_KEY", "JSON_OUTPUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(step_timing, "_SECONDS", 0.01)


def test_a_model_is_measured_without_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "supported", lambda: False)
    path = make_llama(tmp_path / "llama")
    flags = ["--dtype", "float32", "--max-batch-size", "4", "--batch-sizes", "1,4"]
    assert main.run(["warmup", str(path), *flags, "--json-output"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert found["compiled"] == {}
    assert found["dtype"] == "float32"
    assert [row["batch_size"] for row in found["decode"]] == [1, 4]
    assert [row["tokens"] for row in found["prefill"]] == [128]
    assert Path(found["kept"]).is_file()

    limits = Path(found["kept"]).parent
    limits.rename(tmp_path / "gone")
    limits.touch()  # where no folder can be made
    assert main.run(["warmup", str(path), *flags]) == ExitCode.OK
    out, err = capsys.readouterr()
    assert "cannot be saved" in err
    assert "float32 on cpu" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert rows["max_batch_total_tokens"][1] == str(found["max_batch_total_tokens"])
    assert rows["4"][-1].endswith("%")
    assert not set(out) & set("─│╭"), "plain where there is no terminal"
    assert "saved for" not in out


def test_a_missing_model_is_unavailable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["warmup", str(tmp_path / "none" / "x")]) == ExitCode.MODEL_UNAVAILABLE
    assert "error: " in capsys.readouterr().err


class Handler(BaseHTTPRequestHandler):
    """A server of TGI's kind that keeps what it was asked."""

    info: Any = None
    key = ""
    asked: list[dict[str, Any]]
    lock = threading.Lock()
    running = most = 0

    def do_GET(self) -> None:
        self._answer(200, self.info)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.key and self.headers.get("authorization") != f"Bearer {self.key}":
            self._answer(401, {})
            return
        with self.lock:
            type(self).running += 1
            type(self).most = max(self.most, self.running)
            self.asked.append(body)
        threading.Event().wait(0.05)
        with self.lock:
            type(self).running -= 1
        tokens = body["parameters"]["max_new_tokens"]
        self._answer(200, {"generated_text": "", "details": {"generated_tokens": tokens}})

    def _answer(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[tuple[str, type[Handler]]]:
    class Own(Handler):
        """Of this test alone."""

    Own.asked = []
    Own.info = {
        "model_id": "org/model",
        "max_input_tokens": 600,
        "max_total_tokens": 700,
        "max_concurrent_requests": 4,
    }

    with ThreadingHTTPServer(("127.0.0.1", 0), Own) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}", Own
        http.shutdown()
        thread.join()


def test_a_running_server_gets_prompts_of_all_sizes(
    server: tuple[str, type[Handler]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, handler = server
    handler.key = "secret"
    words = ["warmup", "--url", url, "--api-key", "secret,other", "--json-output"]
    assert main.run(words) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert [row["tokens"] for row in found["prefill"]] == [128, 512, 600]
    assert [row["batch_size"] for row in found["batches"]] == [1, 2, 4], "no more than it takes"
    assert [row["tokens"] for row in found["batches"]] == [32, 64, 128]
    assert handler.most == 4
    assert [body["parameters"]["truncate"] for body in handler.asked[:3]] == [128, 512, 600]
    for body in handler.asked:
        assert len(body["inputs"].split()) == body["parameters"]["truncate"]
    assert len({body["inputs"] for body in handler.asked}) == len(handler.asked)

    assert main.run(["warmup", "--url", url, "--api-key", "secret"]) == ExitCode.OK
    assert "org/model at http" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["--url", "localhost:3000"], "is not the URL of a server", ExitCode.USAGE),
        (["--url", "http://127.0.0.1:1"], "is unavailable", ExitCode.FAILURE),
        (["--url", "URL", "--api-key", "wrong"], "rejects the API key", ExitCode.FAILURE),
        (["--url", "URL", "--model-id", "x"], "has its own model", ExitCode.USAGE),
    ],
)
def test_an_unavailable_server_is_reported(
    server: tuple[str, type[Handler]],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
    code: ExitCode,
) -> None:
    url, handler = server
    handler.key = "secret"
    assert main.run(["warmup", *(url if word == "URL" else word for word in words)]) == code
    assert said in capsys.readouterr().err


def test_a_server_without_tgis_routes_is_reported(
    server: tuple[str, type[Handler]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, handler = server
    for info in ([], {"max_input_tokens": None}):
        handler.info = info
        assert main.run(["warmup", "--url", url]) == ExitCode.FAILURE
        assert "is not a server of TGI's kind" in capsys.readouterr().err
