"""A model server that dies and comes back another: with its adapters, and within new limits."""

from __future__ import annotations

import json
import os
import shutil
import signal
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
LENGTH, SHORTER = 256, 96


def tokens(client: httpx.Client, adapter_id: str | None) -> list[int]:
    parameters = {"max_new_tokens": 12, "details": True, "adapter_id": adapter_id}
    answer = client.post("/generate", json={"inputs": "import os", "parameters": parameters})
    assert answer.status_code == 200, answer.text
    return [token["id"] for token in answer.json()["details"]["tokens"]]


def test_a_killed_model_server_comes_back_with_its_adapters_and_within_its_new_limits(
    start_server: StartServer, tmp_path: Path
) -> None:
    base = make_llama(
        tmp_path / "base",
        vocab_size=4096,
        max_position_embeddings=LENGTH,
        tokenizer=demo.model_path(),
    )
    names = ("named", "one", "lost", "unloaded")
    folders = {
        name: make_adapter(base, tmp_path / name, seed=seed, rank=4)
        for seed, name in enumerate(names)
    }
    server = start_server(
        str(base),
        "--lora-adapters",
        f"named={folders['named']}",
        "--no-measured-limits",
        "--dtype",
        "float32",
        API_KEY=KEY,
    )
    server.wait_ready()
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        for name in names[1:]:
            body = {"lora_name": name, "lora_path": str(folders[name])}
            assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
        answer = client.post("/v1/unload_lora_adapter", json={"lora_name": "unloaded"})
        assert answer.status_code == 200
        before = {name: tokens(client, name) for name in (None, "named", "one")}
        assert len({tuple(ids) for ids in before.values()}) == 3, "they differ"
        assert client.get("/info").json()["max_total_tokens"] == LENGTH
        long = {"inputs": "import os", "parameters": {"max_new_tokens": 2 * SHORTER}}
        assert client.post("/generate", json=long).status_code == 200

        shutil.rmtree(folders["lost"])
        config = json.loads((base / "config.json").read_text())
        config["max_position_embeddings"] = SHORTER
        (base / "config.json").write_text(json.dumps(config))
        router, killed = server.child("router"), server.child("model-server")
        os.kill(killed, signal.SIGKILL)
        poll(lambda: "serving again, after" in server.log, 240, "it is restarted")
        poll(lambda: client.get("/health").status_code == 200, 240, "it is healthy again")

        assert {name: tokens(client, name) for name in before} == before
        for name in ("lost", "unloaded"):
            body = {"inputs": "import os", "parameters": {"adapter_id": name}}
            refused = client.post("/generate", json=body)
            assert refused.status_code == 422
            assert "does not exist; adapters: named, one" in refused.json()["error"]
        assert client.get("/info").json()["max_total_tokens"] == SHORTER
        refused = client.post("/generate", json=long)
        assert refused.status_code == 422
        assert f"must be <= {SHORTER}" in refused.json()["error"]
        assert server.child("router") == router
        assert server.child("model-server") != killed
    assert f"max_total_tokens {SHORTER} (was {LENGTH})" in server.log
    (dropped,) = (line for line in server.log.splitlines() if "dropped" in line)
    assert "WARN" in dropped
    assert "adapter lost" in dropped
    assert str(folders["lost"]) in dropped
    server.kill()
