"""A server that sleeps: its model server is gone, and comes back with its adapters."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.system.conftest import StartServer
from tests.tools.checkpoints import make_llama
from tests.tools.lora_adapters import make_adapter
from tests.tools.server_process import poll
from tgi_cli import demo

pytestmark = pytest.mark.system

KEY = "s3cret"
WAKE_SECONDS = 240


def tokens(client: httpx.Client, adapter_id: str | None = None) -> list[int]:
    parameters = {"max_new_tokens": 8, "details": True, "adapter_id": adapter_id}
    answer = client.post("/generate", json={"inputs": "import os", "parameters": parameters})
    assert answer.status_code == 200, answer.text
    return [token["id"] for token in answer.json()["details"]["tokens"]]


def sleeping(client: httpx.Client) -> bool:
    found: bool = client.get("/is_sleeping").json()["is_sleeping"]
    return found


def test_an_idle_server_sleeps_and_a_request_wakes_it(
    start_server: StartServer, tmp_path: Path
) -> None:
    base = make_llama(
        tmp_path / "base",
        vocab_size=4096,
        max_position_embeddings=256,
        tokenizer=demo.model_path(),
    )
    adapter = make_adapter(base, tmp_path / "one", seed=1, rank=4)
    server = start_server(
        str(base),
        "--max-loras=2",
        "--sleep-idle-seconds=1",
        "--max-restarts=0",
        "--no-measured-limits",
        API_KEY=KEY,
    )
    server.wait_ready()
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=WAKE_SECONDS) as client:
        body = {"lora_name": "one", "lora_path": str(adapter)}
        assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
        before = {name: tokens(client, name) for name in (None, "one")}
        router = server.child("router")
        poll(lambda: sleeping(client), WAKE_SECONDS, "it sleeps")
        poll(lambda: server.children() == [router], 60, "the model server is gone")
        assert client.get("/health").json() == {"status": "asleep"}
        assert "tgi_engine_asleep 1" in client.get("/metrics").text

        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda _: tokens(client, "one"), range(8)))
        assert answers == [before["one"]] * 8
        assert tokens(client) == before[None]
        assert 'tgi_engine_wakes_total{result="failure"} 0' in client.get("/metrics").text
        poll(lambda: sleeping(client), WAKE_SECONDS, "it sleeps again")

        # A start that fails: the cause, and another try by the next request.
        config = base / "config.json"
        config.rename(base / "away")
        failed = client.post("/generate", json={"inputs": "import os"})
        assert failed.status_code == 503
        assert "config.json" in failed.json()["error"]
        (base / "away").rename(config)
        assert tokens(client, "one") == before["one"]
        assert server.child("router") == router
        assert "restarting it" not in server.log
        poll(lambda: sleeping(client), WAKE_SECONDS, "it sleeps a third time")
    os.kill(server.process.pid, signal.SIGTERM)
    assert server.wait() == 0
    assert "Traceback" not in server.log
