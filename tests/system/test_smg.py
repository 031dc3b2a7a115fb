"""SMG in front of two ``tgi serve``: sticky prefixes, disconnects, a server that is killed.

The flags are those of docs/distributed.md.
"""

from __future__ import annotations

import re
import secrets
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.system.clients.environment import INSTALL_SECONDS, make_environment
from tests.system.conftest import StartServer
from tests.tools.server_process import ServerProcess, free_ports, poll, stop
from tgi_cli import demo
from tgi_cli.version import __version__

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(INSTALL_SECONDS + 1500)]

REQUIREMENTS = Path(__file__).with_name("servers") / "smg.txt"
SECONDS = 300.0
STREAMS = 8
NEW_TOKENS = 7000
"""Enough that no stream has ended when the last has begun, however busy the machine is."""
LIMIT = 8192


@dataclass
class Gateway:
    """SMG, and the servers behind it."""

    url: str
    log: Path
    servers: list[ServerProcess]


@pytest.fixture(scope="module")
def gateway(
    environments: Path, start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    python = make_environment(environments, REQUIREMENTS)
    limits = ("--rope-factor", "4", "--max-total-tokens", str(LIMIT))
    servers = [start_server(*limits) for _ in range(2)]
    for server in servers:
        server.wait_ready()
    log = tmp_path_factory.mktemp("smg") / "log"
    port, metrics = free_ports(2)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(str(python.with_name("smg")), "launch"),
                *("--worker-urls", *(server.url for server in servers), "--policy", "cache_aware"),
                *("--host", "127.0.0.1", "--port", str(port)),
                *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)),
                *("--health-check-interval-secs", "2", "--cb-timeout-duration-secs", "5"),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
        )
    found = Gateway(f"http://127.0.0.1:{port}", log, servers)
    try:
        poll(lambda: registered(found), SECONDS, "both servers are registered")
        yield found
    finally:
        stop(process)


@pytest.fixture
def client(gateway: Gateway) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=gateway.url, timeout=SECONDS, limits=limits) as client:
        yield client


def registered(gateway: Gateway) -> bool:
    try:
        answer = httpx.get(f"{gateway.url}/workers", timeout=SECONDS)
    except httpx.TransportError:
        return False
    workers = answer.json().get("workers", [])
    return len(workers) == 2 and all(worker["is_healthy"] for worker in workers)


def dropped(gateway: Gateway) -> float:
    """Requests whose clients have left, of all servers."""
    name = r'tgi_request_failure\{err="dropped"\}'
    return sum(metric(server, name) for server in gateway.servers)


def metric(server: ServerProcess, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=SECONDS).text
    found = re.search(rf"^{name} (\S+)$", lines, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def test_servers_are_recognised(gateway: Gateway, client: httpx.Client) -> None:
    workers = client.get("/workers").json()["workers"]
    assert {worker["url"] for worker in workers} == {server.url for server in gateway.servers}
    for worker in workers:
        assert [model["context_length"] for model in worker["models"]] == [LIMIT]
        assert worker["labels"]["version"] == __version__
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [demo.MODEL_ID]
    poll(lambda: "SECURITY POSTURE" in gateway.log.read_text(), SECONDS, "its log is written")
    warnings = [line for line in gateway.log.read_text().splitlines() if "WARN" in line]
    assert len(warnings) == 1, warnings
    assert "SECURITY POSTURE" in warnings[0], "SMG itself has no key"


def test_answers_of_our_apis_pass(gateway: Gateway, client: httpx.Client) -> None:
    body = {"inputs": "import os", "parameters": {"max_new_tokens": 5}}
    direct = httpx.post(f"{gateway.servers[0].url}/generate", json=body, timeout=SECONDS)
    assert client.post("/generate", json=body).json() == direct.json()
    messages = [{"role": "user", "content": "Hi"}]
    chat = {"model": demo.MODEL_ID, "messages": messages, "max_tokens": 5}
    usage = client.post("/v1/chat/completions", json=chat).json()["usage"]
    assert usage["completion_tokens"] == 5


def test_each_prefix_stays_at_one_server(gateway: Gateway, client: httpx.Client) -> None:
    def counted() -> list[float]:
        return [
            sum(metric(server, f"tgi_prefix_cache_{what}_tokens_total") for server in servers)
            for what in ("query", "hit")
        ]

    servers = gateway.servers
    before = counted()
    prefixes = [f"# {secrets.token_hex(48)}\n" * 6 for _ in range(8)]
    cold = dict.fromkeys(prefixes, 0)
    for tail in range(10):
        for prefix in prefixes:
            body = {"model": demo.MODEL_ID, "prompt": f"{prefix}x{tail} = ", "max_tokens": 2}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            cold[prefix] += not answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert list(cold.values()) == [1] * 8
    asked, hit = (now - then for now, then in zip(counted(), before, strict=True))
    assert hit > 0.8 * asked


def test_a_client_that_leaves_ends_its_request(gateway: Gateway, client: httpx.Client) -> None:
    body = {"model": demo.MODEL_ID, "prompt": "def f():", "max_tokens": NEW_TOKENS}
    options = {"ignore_eos": True, "stream": True}
    before = dropped(gateway)
    for _ in range(4):
        with client.stream("POST", "/v1/completions", json=body | options) as answer:
            next(answer.iter_lines())
    poll(lambda: not any(running(gateway)), SECONDS, "both are idle")
    assert dropped(gateway) > before, "they have run to their ends"


def running(gateway: Gateway) -> list[float]:
    return [metric(server, "tgi_batch_current_size") for server in gateway.servers]


def test_a_killed_server_loses_its_own_streams_alone(
    gateway: Gateway, client: httpx.Client
) -> None:
    """The last test: one server is left."""
    prefixes = [prefix_at(server, client) for server in gateway.servers]
    begun = threading.Barrier(STREAMS + 1, timeout=SECONDS)
    killed = threading.Event()

    def stream(number: int) -> str:
        """The last line but one of a stream that goes on after a server was killed."""
        prompt = f"{prefixes[number % 2]}x{number} = "
        body = {"model": demo.MODEL_ID, "prompt": prompt, "max_tokens": NEW_TOKENS}
        options = {"ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body | options) as answer:
            lines = filter(None, answer.iter_lines())
            next(lines)
            begun.wait()
            killed.wait(SECONDS)
            return list(lines)[-2]

    with ThreadPoolExecutor(STREAMS) as threads:
        streams = [threads.submit(stream, number) for number in range(STREAMS)]
        begun.wait()
        gateway.servers[1].kill()
        killed.set()
        body = {"model": demo.MODEL_ID, "prompt": "import os", "max_tokens": 3}
        for _ in range(24):
            assert client.post("/v1/completions", json=body).status_code == 200
        last = [each.result(SECONDS) for each in streams]
    assert all('"finish_reason":"length"' in line for line in last[0::2]), last
    assert all('"error"' in line for line in last[1::2]), last


def prefix_at(server: ServerProcess, client: httpx.Client) -> str:
    """The beginning of prompts that the gateway sends to a server."""
    for _ in range(50):
        prefix = f"# {secrets.token_hex(48)}\n" * 6
        before = metric(server, "tgi_request_count")
        body = {"model": demo.MODEL_ID, "prompt": prefix, "max_tokens": 1}
        assert client.post("/v1/completions", json=body).status_code == 200
        if metric(server, "tgi_request_count") > before:
            return prefix
    raise AssertionError("all go to the other one")
