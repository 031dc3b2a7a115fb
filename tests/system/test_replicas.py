"""``tgi serve --replicas 2``: prefixes stay, a killed replica, a rolling restart under load."""

from __future__ import annotations

import os
import re
import secrets
import signal
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.system.conftest import StartServer
from tests.tools.concurrent_requests import ConcurrentRequests
from tests.tools.process_tree import command_of
from tests.tools.server_process import ServerProcess, poll

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

STREAMS = 16
NEW_TOKENS = 1500
"""Enough that no stream has ended when the last has begun, however busy the machine is."""
SECONDS = 240.0
RETURNED = "serving again, after"
RESTARTED = "all model servers have been restarted"


@pytest.fixture(scope="module")
def replicas(start_server: StartServer) -> ServerProcess:
    # No drafts, which would end a text that repeats itself within a moment.
    context = ("--max-total-tokens", str(NEW_TOKENS + 100))
    server = start_server("--replicas", "2", "--speculate", "0", *context)
    server.wait_ready()
    return server


@pytest.fixture
def client(replicas: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=replicas.url, timeout=SECONDS) as client:
        yield client


def model_servers(server: ServerProcess) -> list[int]:
    return sorted(pid for pid in server.children() if " model-server " in command_of(pid))


def is_healthy(client: httpx.Client) -> bool:
    return bool(client.get("/health").json().get("status") == "ok")


def routed(client: httpx.Client) -> dict[tuple[str, str], int]:
    """Requests by replica and reason."""
    found = re.findall(
        r'^tgi_replica_requests_total{replica="(\d)",reason="(\w+)"} (\d+)$',
        client.get("/metrics").text,
        re.MULTILINE,
    )
    return {(replica, reason): int(count) for replica, reason, count in found}


def test_each_prefix_is_computed_once_and_both_replicas_are_used(client: httpx.Client) -> None:
    before = routed(client)
    prefixes = [f"# {secrets.token_hex(48)}\n" * 3 for _ in range(8)]
    cold = dict.fromkeys(prefixes, 0)
    for tail in range(4):
        for prefix in prefixes:
            body = {"prompt": f"{prefix}x{tail} = ", "max_tokens": 2, "temperature": 0}
            usage = client.post("/v1/completions", json=body).json()["usage"]
            cold[prefix] += not usage["prompt_tokens_details"]["cached_tokens"]
    assert list(cold.values()) == [1] * 8
    added = {key: count - before[key] for key, count in routed(client).items()}
    assert added["0", "prefix"] + added["1", "prefix"] == 24
    assert added["0", "load"] == added["1", "load"] == 4


@pytest.mark.parametrize(
    "hint", ["x-claude-code-session-id", "session-id", "session_id", "prompt_cache_key"]
)
def test_sessions_of_agents_stay(client: httpx.Client, hint: str) -> None:
    """Without a common prefix: a hint says that requests belong together."""
    poll(lambda: is_healthy(client), SECONDS, "both are healthy")
    session = secrets.token_hex(8)
    in_body = hint == "prompt_cache_key"
    headers = {} if in_body else {hint: session}
    before = routed(client)
    for _ in range(5):
        body = {
            "model": "tgi",
            "messages": [{"role": "user", "content": secrets.token_hex(200)}],
            "max_tokens": 1,
            **({hint: session} if in_body else {}),
        }
        answer = client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
    added = {key: count - before[key] for key, count in routed(client).items()}
    assert sorted((added["0", "session"], added["1", "session"])) == [0, 4]
    assert added["0", "load"] + added["1", "load"] == 1


def test_replicas_have_cores_of_their_own(replicas: ServerProcess) -> None:
    first, second = (os.sched_getaffinity(pid) for pid in model_servers(replicas))
    everywhere = os.sched_getaffinity(0)
    assert (first | second) <= everywhere
    if len(everywhere) > 1:
        assert not first & second


def test_a_killed_replica_ends_its_own_streams_only(
    replicas: ServerProcess, client: httpx.Client
) -> None:
    poll(lambda: is_healthy(client), SECONDS, "both are healthy")
    killed = model_servers(replicas)[0]
    crowd = ConcurrentRequests(replicas.url, ["openai stream"] * STREAMS, NEW_TOKENS)
    crowd.wait_until_started(endless=False)
    returned = replicas.log.count(RETURNED)
    os.kill(killed, signal.SIGKILL)
    poll(
        lambda: not is_healthy(client) or replicas.log.count(RETURNED) > returned,
        SECONDS,
        "/health says that one is missing, unless it is back already",
    )
    body = {"inputs": "import os", "parameters": {"max_new_tokens": 5}}
    for _ in range(20):
        assert client.post("/generate", json=body).status_code == 200
        assert client.get("/health").status_code == 200
    outcomes = crowd.outcomes()
    assert len(outcomes) == STREAMS, "some hang"
    failed = [outcome for outcome in outcomes if outcome.kind != "well"]
    assert 0 < len(failed) <= STREAMS // 2 + 2
    assert {(each.kind, each.text) for each in failed} == {("error", failed[0].text)}
    assert "the model server is gone" in failed[0].text
    poll(lambda: is_healthy(client), SECONDS, "it is back")
    assert len(model_servers(replicas)) == 2
    assert killed not in model_servers(replicas)


def test_a_rolling_restart_refuses_nothing(replicas: ServerProcess, client: httpx.Client) -> None:
    poll(lambda: is_healthy(client), SECONDS, "both are healthy")
    before, router = model_servers(replicas), replicas.child("router")
    restarts = replicas.log.count(RESTARTED)
    done = threading.Event()
    answers: list[tuple[int, str]] = []

    def ask() -> None:
        body = {"inputs": "def read_json(path):", "parameters": {"max_new_tokens": 30}}
        while not done.is_set():
            try:
                answer = client.post("/generate", json=body)
            except httpx.HTTPError as error:
                answers.append((0, repr(error)))
            else:
                answers.append((answer.status_code, answer.text))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    replicas.process.send_signal(signal.SIGHUP)
    try:
        poll(lambda: replicas.log.count(RESTARTED) > restarts, SECONDS, "the restart is complete")
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert [answer for answer in answers if answer[0] != 200] == []
    assert not set(model_servers(replicas)) & set(before)
    assert len(model_servers(replicas)) == 2
    assert replicas.child("router") == router
