"""Replicas whose weights come from S3, and whose prefixes survive them in one folder."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.conftest import StartServer
from tests.tools.checkpoints import make_llama
from tests.tools.process_tree import command_of
from tests.tools.server_process import ServerProcess, poll
from tests.tools.store_server import StoreServer
from tgi_cli import demo

pytestmark = pytest.mark.system

FIRST = "def total(values):\n    return sum(values)\n\n\n" * 60
OTHER = "the session of another replica"
SECOND = "\n\n# The second question: what does total([]) return?\n"
RESTARTED = "serving again, after"


def ask(client: httpx.Client, prompt: str | list[int], session: str = "") -> dict[str, Any]:
    body = {"model": "tgi", "prompt": prompt, "max_tokens": 24, "temperature": 0, "logprobs": 3}
    headers = {"session-id": session} if session else {}
    answer = client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def model_servers(server: ServerProcess) -> list[int]:
    return [pid for pid in server.children() if " model-server " in command_of(pid)]


def blocks_by_event(client: httpx.Client, replica: int) -> dict[str, int]:
    """What the replica has counted of blocks in the folder."""
    label = rf'tgi_kv_cache_dir_blocks_total{{replica="{replica}",event="(\w+)"}} (\d+)'
    return {event: int(n) for event, n in re.findall(label, client.get("/metrics").text)}


def test_a_conversation_goes_on_after_a_kill_without_its_prefill(
    start_server: StartServer, tmp_path: Path
) -> None:
    pytest.importorskip("obstore")
    # Of a size whose prompts take longer to compute than files to read.
    model = make_llama(
        tmp_path / "m",
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        max_position_embeddings=4096,
        files=3,
        tokenizer=demo.model_path(),
    )
    kept = tmp_path / "kv"
    with StoreServer() as store:
        files = {path.name: path.read_bytes() for path in model.iterdir()}
        store.put_folder("models", "org/m", files)
        server = start_server(
            "s3://models/org/m",
            "--load-format",
            "stream",
            "--kv-cache-dir",
            str(kept),
            "--replicas",
            "2",
            "--no-measured-limits",
            AWS_ENDPOINT_URL=store.url,
            AWS_ACCESS_KEY_ID="AKIATEST",
            AWS_SECRET_ACCESS_KEY="c2VjcmV0",
            HF_HUB_CACHE=str(tmp_path / "cache" / "hub"),
        )
        server.wait_ready()
        with httpx.Client(base_url=server.url, timeout=60) as client:
            models = client.get("/v1/models").json()["data"]
            assert models[0]["id"] == "s3://models/org/m"
            first = ask(client, FIRST)
            turn = FIRST + first["choices"][0]["text"] + SECOND
            before = ask(client, turn)
            prompt = before["usage"]["prompt_tokens"]
            blocks = (prompt + 24 - 1) // 16
            poll(lambda: len([*kept.glob("*.kv")]) >= blocks, 60, "all blocks are written")

            ask(client, "x = ", OTHER)  # goes to the replica whose cache is empty
            written = [blocks_by_event(client, replica)["written"] for replica in range(2)]
            writer = written.index(max(written))

            def restart() -> None:
                before = server.log.count(RESTARTED)
                for pid in model_servers(server):
                    os.kill(pid, signal.SIGKILL)
                poll(lambda: server.log.count(RESTARTED) == before + 2, 240, "both are restarted")
                poll(lambda: '"ok"' in client.get("/health").text, 240, "both are healthy again")

            restart()
            after = ask(client, turn, OTHER)
            assert after["choices"] == before["choices"], "the log-probabilities, too"
            assert prompt - cached(after) <= 16, "all of it but a part of a block"
            hits = [blocks_by_event(client, replica)["hit"] for replica in range(2)]
            assert hits[1 - writer] >= cached(after) // 16 > hits[writer] == 0

            torn = sorted(kept.glob("*.kv"))[: blocks // 2]
            for path in torn:
                os.truncate(path, 100)
            restart()
            again = ask(client, turn)
            assert again["choices"] == before["choices"]
            assert cached(again) < cached(after)
            counts = [blocks_by_event(client, replica) for replica in range(2)]
            assert sum(each["damaged"] for each in counts) >= 1
            assert sum(each["miss"] for each in counts) >= 1
            held = re.findall(r"tgi_kv_cache_dir_bytes{.*} (\d+)", client.get("/metrics").text)
            assert len(held) == 2
            assert min(map(int, held)) > 0
        assert "is torn or damaged: removed" in server.log
        server.kill()
    sizes = [path.stat() for path in (tmp_path / "cache").rglob("*.safetensors")]
    assert len(sizes) == 3
    assert all(size.st_blocks * 512 < size.st_size // 4 for size in sizes), "headers alone"
