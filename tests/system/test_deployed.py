"""The server that a file of `tgi deploy` starts: its limits, its keys, its health check."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import yaml

from tests.system.conftest import StartServer


def test_the_server_of_a_file(start_server: StartServer, tmp_path: Path) -> None:
    variables = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    text = subprocess.run(
        [sys.executable, "-m", "tgi_cli", "deploy", "compose", "--max-batch-size", "4"],
        env=variables,
        capture_output=True,
        check=True,
        timeout=200,
    ).stdout.decode()
    assert "# Memory, measured on " in text
    service = yaml.safe_load(text)["services"]["tgi"]
    key = tmp_path / "api-key"
    key.write_text("sk-1\n")
    arguments = [word for word in service["command"][1:] if not word.startswith("--port=")]
    assert len(arguments) == len(service["command"]) - 2
    server = start_server(*arguments, API_KEY_FILE=str(key), XDG_CACHE_HOME=str(tmp_path))
    server.wait_ready()

    limits = dict(word[2:].split("=") for word in arguments if "=" in word)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        found = client.get("/info", headers={"authorization": "Bearer sk-1"}).json()
        refused = client.get("/info")
        metrics = client.get("/metrics").text
    assert found["max_total_tokens"] == int(limits["max-total-tokens"])
    assert refused.status_code == 401
    cached = f"tgi_batch_max_total_tokens {limits['max-batch-total-tokens']}\n"
    assert cached in metrics

    check = service["healthcheck"]["test"][2:]
    for port, status in ((urlsplit(server.url).port, 0), (1, 1)):
        words = [word.replace(":3000/", f":{port}/") for word in check]
        done = subprocess.run([sys.executable, *words], capture_output=True, timeout=60)
        assert done.returncode == status, done.stderr
