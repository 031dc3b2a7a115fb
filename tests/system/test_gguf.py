"""`tgi quantize --format gguf`, then `tgi serve` of the file by its tag on the hub."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.tools.hub_server import HubServer
from tests.tools.server_process import ServerProcess, stop
from tgi_cli import demo
from tgi_cli.text.tokenizer import Tokenizer

NAME = "demo-Q8_0.gguf"
PROMPT = "def add(a, b):"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    path = folder / NAME
    words = ["quantize", str(demo.model_path()), str(path), "--format", "gguf", "--bits", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "tgi_cli", *words], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(path)
    return path


@pytest.fixture(scope="module")
def server(folder: Path, file: Path) -> Iterator[ServerProcess]:
    with HubServer() as hub:
        hub.add("org/demo", {NAME: file.read_bytes(), "mmproj-F16.gguf": b"GGUF"})
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home")}
        server = ServerProcess(
            folder / "server", ["serve", "org/demo:q8_0", "--port", "0"], environment
        )
        try:
            server.wait_ready()
            yield server
            stop(server.process)
        finally:
            server.kill()


def test_a_tag_of_the_hub_is_served(server: ServerProcess) -> None:
    info = httpx.get(f"{server.url}/info", timeout=60).json()
    assert info["model_id"] == "org/demo:q8_0"
    assert "mmproj-F16.gguf is ignored" in server.log
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 8, "details": True}}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()
    ids = [token["id"] for token in answer["details"]["tokens"]]
    tokenizer = Tokenizer.load(demo.model_path())
    assert answer["generated_text"] == tokenizer.decode(ids)
    assert answer["generated_text"].strip()


def test_chats_use_the_template_of_the_metadata(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": "tgi", "messages": messages, "max_tokens": 4}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    rendered = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = Tokenizer.load(demo.model_path())
    assert answer["usage"]["prompt_tokens"] == len(tokenizer.encode(rendered))


def test_inspect_shows_the_types(file: Path, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tgi_cli", "quantize", "--inspect", str(file)],
        env={"HF_HOME": str(folder / "home"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "LlamaForCausalLM, gguf" in done.stdout
    assert "Q8_0" in done.stdout
