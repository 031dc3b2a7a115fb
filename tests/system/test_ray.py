"""`tgi deploy ray` on this machine: prefixes, disconnects, a killed model server and replica.

One cluster serves all tests, which leave it with two replicas; the last one ends it.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.tools.concurrent_requests import ConcurrentRequests
from tests.tools.process_tree import command_of, descendants_of, is_gone
from tests.tools.server_process import ServerProcess, free_ports, kill, poll

pytest.importorskip("ray.serve", reason="Ray Serve is not installed")

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(1500)]

STREAMS = 64
NEW_TOKENS = 150
START_SECONDS = 600.0
HEAL_SECONDS = 300.0
SECONDS = 300.0
"""For whatever else is waited for."""
REPLICA = "ray::ServeReplica:tgi:engine"


@pytest.fixture(scope="module")
def cluster() -> Iterator[ServerProcess]:
    # Not tmp_path: the paths of sockets must be short.
    with tempfile.TemporaryDirectory(prefix="tgi-ray-") as base:
        (port,) = free_ports(1)
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        words = ["--hostname", "127.0.0.1", "--port", str(port), "--replicas", "2"]
        server = ServerProcess(
            Path(base) / "server",
            ["deploy", "ray", *words, "--cpus", "2", "--replica-cpus", "1"],
            {"HOME": base, "XDG_CACHE_HOME": cache, "RAY_AUTH_MODE": "token"},
        )
        try:
            server.wait_ready(START_SECONDS)
            yield server
        finally:
            server.kill()


@pytest.fixture
def client(cluster: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=SECONDS) as client:
        poll(lambda: len(metric(client, "tgi_queue_size")) == 2, HEAL_SECONDS, "both serve")
        yield client


def metric(client: httpx.Client, name: str) -> dict[str, float]:
    """A metric without other labels, by replica; without those that do not answer in time."""
    answer = client.get("/metrics")
    found = re.findall(rf'^{name}{{replica="(\w+)"}} (\S+)$', answer.text, re.MULTILINE)
    return {replica: float(value) for replica, value in found}


def metric_of_both(client: httpx.Client, name: str) -> dict[str, float]:
    """A metric without other labels, once both replicas answer."""
    found: dict[str, float] = {}

    def read() -> bool:
        found.clear()
        found.update(metric(client, name))
        return len(found) == 2

    poll(read, SECONDS, "both replicas answer")
    return found


def dropped(client: httpx.Client) -> float:
    """Requests whose clients have left, once both replicas answer."""
    counts: list[str] = []

    def read() -> bool:
        pattern = r'^tgi_request_failure\{[^}]*err="dropped"[^}]*\} (\S+)$'
        counts[:] = re.findall(pattern, client.get("/metrics").text, re.MULTILINE)
        return len(counts) == 2

    poll(read, SECONDS, "both replicas answer")
    return sum(map(float, counts))


def processes(cluster: ServerProcess, word: str) -> list[int]:
    return [pid for pid in descendants_of(cluster.process.pid) if word in command_of(pid)]


def test_answers_of_every_api_pass(client: httpx.Client) -> None:
    body = {"inputs": "import os", "parameters": {"max_new_tokens": 5}}
    assert client.post("/generate", json=body).json()["generated_text"]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    assert client.post("/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"]
    answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": -1})
    assert answer.status_code == 400
    assert answer.headers["x-request-id"]
    assert client.get("/health").status_code == 200
    listed = client.get("/v1/models").json()["data"]
    assert client.get("/info").json()["model_id"] == listed[0]["id"]


def test_each_prefix_is_computed_once(client: httpx.Client) -> None:
    prefixes = [f"# {secrets.token_hex(48)}\n" * 6 for _ in range(8)]
    cold = dict.fromkeys(prefixes, 0)
    for tail in range(6):
        for prefix in prefixes:
            body = {"prompt": f"{prefix}x{tail} = ", "max_tokens": 2, "temperature": 0}
            usage = client.post("/v1/completions", json=body).json()["usage"]
            cold[prefix] += not usage["prompt_tokens_details"]["cached_tokens"]
    assert min(cold.values()) == 1
    # Ray passes over a replica that does not take a request in time, as on a busy machine. Without
    # regard to prefixes, nearly all of them would be computed twice.
    assert sum(cold.values()) <= 8 + 2, cold
    found = metric_of_both(client, "tgi_prefix_cache_query_tokens_total")
    assert min(found.values()) > 0, "one replica got everything"


def test_prometheus_can_read_the_metrics_of_both(client: httpx.Client) -> None:
    accept = {"accept": "application/openmetrics-text; version=1.0.0, text/plain; q=0.5"}
    wanted = set(metric_of_both(client, "tgi_queue_size"))

    def replicas() -> set[str]:
        answer = client.get("/metrics", headers=accept)
        families = {each.name: each for each in text_string_to_metric_families(answer.text)}
        assert families["tgi_request_duration"].type == "histogram"
        return {sample.labels["replica"] for sample in families["tgi_queue_size"].samples}

    poll(lambda: replicas() == wanted, SECONDS, "both replicas answer")


def test_a_body_that_is_too_large(client: httpx.Client) -> None:
    large = b'{"inputs": "%b"}' % (b" " * 3_000_000)
    headers = {"content-type": "application/json"}
    assert client.post("/generate", content=large, headers=headers).status_code == 413


def test_a_client_that_leaves_ends_its_request(client: httpx.Client) -> None:
    body = {"prompt": "def f():", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    # Hot, so that no text is repeated, which drafts would end within a moment.
    body["temperature"] = 1.5
    before = dropped(client)
    for _ in range(4):
        with client.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
    poll(
        lambda: list(metric(client, "tgi_batch_current_size").values()) == [0, 0],
        SECONDS,
        "both are idle",
    )
    assert dropped(client) > before, "they have run to their ends"


def test_the_token_of_the_cluster_is_private(cluster: ServerProcess, client: httpx.Client) -> None:
    token = Path(cluster.runtime).parents[1] / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) >= 32


def test_a_killed_model_server_fails_no_new_request(
    cluster: ServerProcess, client: httpx.Client
) -> None:
    killed = processes(cluster, " model-server ")[0]
    os.kill(killed, signal.SIGKILL)
    body = {"inputs": "import os", "parameters": {"max_new_tokens": 3}}
    statuses = [client.post("/generate", json=body).status_code for _ in range(60)]
    # One may be on its way when the replica notices.
    assert statuses.count(200) >= 59, statuses
    poll(lambda: is_gone(killed), SECONDS, "it ends")
    poll(lambda: len(processes(cluster, " model-server ")) == 2, HEAL_SECONDS, "it is restarted")


def test_a_killed_replica_ends_its_own_streams_and_is_replaced(
    cluster: ServerProcess, client: httpx.Client
) -> None:
    before = metric_of_both(client, "tgi_request_count")
    killed = processes(cluster, REPLICA)[0]
    orphan = next(pid for pid in descendants_of(killed) if " model-server " in command_of(pid))
    crowd = ConcurrentRequests(cluster.url, ["stream", "openai stream"] * 32, NEW_TOKENS)
    crowd.wait_until_started(SECONDS, endless=False)
    started = metric_of_both(client, "tgi_request_count")
    kill(killed)
    body = {"inputs": "import os", "parameters": {"max_new_tokens": 3}}
    statuses = [client.post("/generate", json=body).status_code for _ in range(40)]
    outcomes = crowd.outcomes(SECONDS)
    assert len(outcomes) == STREAMS, "some hang"
    assert "torn" not in {outcome.kind for outcome in outcomes}
    failed = [outcome for outcome in outcomes if outcome.kind != "well"]
    assert all("the model server is gone" in outcome.text for outcome in failed)
    assert statuses.count(200) >= 39, statuses
    poll(lambda: is_gone(orphan), SECONDS, "its model server ends")

    def replaced() -> bool:
        now = metric(client, "tgi_queue_size").keys()
        return len(now) == 2 and len(now - before.keys()) == 1

    poll(replaced, HEAL_SECONDS, "another replica serves")
    (lost,) = before.keys() - metric_of_both(client, "tgi_queue_size").keys()
    assert len(failed) <= started[lost] - before[lost], "others fail as well"


def test_a_signal_finishes_what_is_in_flight(cluster: ServerProcess, client: httpx.Client) -> None:
    body = {"inputs": "def f():", "parameters": {"max_new_tokens": 60}}
    texts: list[str] = []
    begun = threading.Event()

    def stream() -> None:
        with httpx.stream(
            "POST", f"{cluster.url}/generate_stream", json=body, timeout=SECONDS
        ) as found:
            for line in found.iter_lines():
                begun.set()
                texts.append(line)

    thread = threading.Thread(target=stream)
    thread.start()
    assert begun.wait(SECONDS)
    started = descendants_of(cluster.process.pid)
    cluster.process.terminate()
    thread.join(SECONDS)
    assert any('"generated_text":"' in line for line in texts), texts[-3:]
    assert cluster.wait() == 0
    poll(lambda: all(map(is_gone, started)), SECONDS, "nothing is left")
