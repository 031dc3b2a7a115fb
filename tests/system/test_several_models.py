"""Several models behind one port, of which one fits."""

from __future__ import annotations

import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.system.conftest import StartServer
from tests.tools.process_tree import descendants_of, is_gone
from tests.tools.server_process import poll
from tgi_cli import demo

pytestmark = pytest.mark.system

MAX_SECONDS = 120


def complete(client: httpx.Client, model: str) -> tuple[int, str]:
    body = {"model": model, "prompt": "import os", "max_tokens": 4, "temperature": 0}
    answer = client.post("/v1/completions", json=body)
    return answer.status_code, answer.json().get("model", answer.text)


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), 0.0)


def test_requests_for_two_models_are_served_by_one_at_a_time(
    start_server: StartServer, tmp_path: Path
) -> None:
    folder = shutil.copytree(demo.model_path(), tmp_path / "copy")
    models = {
        "first": {"model": str(demo.model_path()), "max-total-tokens": 512},
        "second": {"model": str(folder), "served-model-name": ["2nd"]},
    }
    file = tmp_path / "models.yaml"
    file.write_text(json.dumps(models))
    server = start_server(
        "--models", str(file), "--models-max", "1", "--model-residence-seconds", "0"
    )
    server.wait_ready()
    with httpx.Client(base_url=server.url, timeout=MAX_SECONDS) as client:
        with ThreadPoolExecutor(12) as threads:
            asked = ["first", "second", "2nd"] * 4
            found = list(threads.map(lambda model: complete(client, model), asked))
        names = {"2nd": "second"}
        assert found == [(200, names.get(model, model)) for model in asked]
        assert complete(client, "third")[0] == 404
        listed = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
        assert sorted(card["status"]["value"] for card in listed.values()) == ["loaded", "unloaded"]
        assert listed["first"]["max_model_len"] == 512
        assert metric(client, "tgi_model_switches_total") <= 2

        processes = descendants_of(server.process.pid)
        assert processes
        os.kill(server.process.pid, signal.SIGKILL)
    poll(lambda: all(map(is_gone, processes)), 60, "no process is left")
