"""``tgi serve`` whose parts are killed or stopped: what clients see, and that it comes back."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from tests.system.conftest import StartServer
from tests.tools.checkpoints import make_llama
from tests.tools.concurrent_requests import ROUTES, ConcurrentRequests, Outcome, request_body
from tests.tools.process_tree import descendants_of, is_gone, shard_process_of
from tests.tools.server_process import ServerProcess, kill, poll
from tgi_cli import demo
from tgi_cli.errors import ExitCode

pytestmark = pytest.mark.system

FORMS = [*ROUTES] * 8
ENDLESS = 8000
"""Tokens: nothing ends by itself while a test lasts."""
TIMEOUT = 8
FLAGS = (
    "--no-measured-limits",
    "--dtype",
    "float32",
    "--watchdog-timeout",
    str(TIMEOUT),
    "--max-restarts",
    "99",
    "--graceful-termination-timeout",
    "240",
)
KEYS = {"timestamp", "level", "fields", "target", "role"}

Start = Callable[[int], "Server"]


class Server:
    """A server that is going to suffer."""

    def __init__(self, process: ServerProcess, temporary: Path) -> None:
        self.process = process
        self.temporary = temporary
        self.url = process.url
        self._client = httpx.Client(base_url=self.url, timeout=60)

    @property
    def shard(self) -> int:
        return self.process.child("model-server")

    @property
    def running(self) -> bool:
        return self.process.process.poll() is None

    def health(self) -> int:
        return self._client.get("/health").status_code

    def answer(self) -> str:
        """To a short question."""
        answer = self.ask("whole", 20)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["generated_text"])

    def ask(self, form: str, new_tokens: int) -> httpx.Response:
        return self._client.post(ROUTES[form], json=request_body(form, new_tokens))

    def crowd(self, forms: list[str], new_tokens: int = ENDLESS) -> ConcurrentRequests:
        crowd = ConcurrentRequests(self.url, forms, new_tokens)
        crowd.wait_until_started(endless=new_tokens == ENDLESS)
        if new_tokens == ENDLESS:  # those that are not streamed, too
            poll(lambda: self.in_engine() == crowd.size, 120, "the engine has all of them")
        return crowd

    def in_engine(self) -> float:
        """Requests that run or wait in the engine."""
        found = re.findall(
            r"^tgi_(?:batch_current|queue)_size (\S+)$",
            self._client.get("/metrics").text,
            re.MULTILINE,
        )
        return sum(map(float, found))

    def everything(self) -> list[int]:
        """Processes that must be gone when it is."""
        return descendants_of(self.process.process.pid)

    def assert_nothing_is_left(self, processes: list[int]) -> None:
        poll(lambda: all(is_gone(pid) for pid in processes), 60, "the processes end")
        assert list(self.process.runtime.iterdir()) == []
        assert list(self.temporary.iterdir()) == []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(
        tmp_path_factory.mktemp("model"),
        dtype=torch.float32,
        vocab_size=4096,
        max_position_embeddings=ENDLESS + 200,
        eos_token_id=[],
        tokenizer=demo.model_path(),
    )


@pytest.fixture(scope="module")
def start(
    start_server: StartServer, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Start]:
    """A server of so many shards: the one that a test before has left, or another."""
    started: dict[int, Server] = {}

    def get(shards: int) -> Server:
        if shards not in started or not started[shards].running:
            folder = tmp_path_factory.mktemp("temporary")
            arguments = (str(model), *FLAGS, "--json-output", "--num-shard", str(shards))
            process = start_server(*arguments, TMPDIR=str(folder))
            process.wait_ready()
            started[shards] = Server(process, folder)
        return started[shards]

    yield get
    for server in started.values():
        if server.running:
            processes = server.everything()
            server.process.kill()
            for pid in processes:
                kill(pid)


def assert_told(outcomes: list[Outcome], count: int, *causes: str) -> None:
    """All have ended with an error, in their own form, that says why."""
    assert len(outcomes) == count, "some hang"
    for outcome in outcomes:
        assert outcome.kind == "error", outcome
        assert any(cause in outcome.text for cause in causes), outcome
        if not outcome.form.endswith("stream"):
            failed = "500 " if outcome.form.startswith("openai") else "424 "
            assert outcome.text.startswith((failed, "503 ")), outcome


@contextmanager
def unloadable(model: Path) -> Iterator[None]:
    """No model server can start while the block lasts, however long a test takes to look."""
    config = model / "config.json"
    away = config.rename(model / "away")
    try:
        yield
    finally:
        away.rename(config)


def assert_unwell(server: Server) -> None:
    """New requests are sent elsewhere meanwhile."""
    poll(lambda: server.health() == 503, 60, "/health says 503")
    for form in ROUTES:
        refused = server.ask(form, 5)
        assert refused.status_code == 503, refused.text
        assert int(refused.headers["retry-after"]) > 0


def assert_returns(server: Server, lost: int, right: str) -> None:
    """With another model server, the same router, and the same answers."""
    poll(lambda: server.health() == 200, 240, "it is healthy again")
    assert server.shard != lost
    assert is_gone(lost)
    assert server.answer() == right


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_model_server_lost_under_load_ends_its_streams_and_comes_back(
    start: Start, model: Path, fault: signal.Signals
) -> None:
    server = start(1)
    right = server.answer()
    shard, router = server.shard, server.process.child("router")
    crowd = server.crowd(FORMS)
    with unloadable(model):
        os.kill(shard, fault)
        causes = ("the model server is gone", f"has not moved for {TIMEOUT} s")
        assert_told(crowd.outcomes(), len(FORMS), *causes)
        assert_unwell(server)
    assert_returns(server, shard, right)
    assert server.process.child("router") == router
    if fault is signal.SIGSTOP:
        assert f"the model server has not run for {TIMEOUT} s" in server.process.log


def test_sigterm_under_load_lets_all_finish_and_all_of_its_life_is_json(start: Start) -> None:
    """After what it went through in the tests above, if they ran."""
    server = start(1)
    processes = server.everything()
    crowd = server.crowd(["stream", "openai stream"] * 16, new_tokens=600)
    for pid in [server.process.process.pid, *processes]:  # as service managers may do
        os.kill(pid, signal.SIGTERM)
    outcomes = crowd.outcomes()
    assert [outcome.kind for outcome in outcomes] == ["well"] * crowd.size
    assert server.process.wait() == ExitCode.OK
    server.assert_nothing_is_left(processes)
    lines = [json.loads(line) for line in server.process.log.splitlines()]
    assert all(set(line) == KEYS for line in lines)
    assert {line["role"] for line in lines} == {"launcher", "model-server", "router"}
    (ready,) = [line["fields"] for line in lines if "kv_blocks" in line["fields"]]
    assert (ready["url"], ready["num_shard"], ready["dtype"]) == (server.url, 1, "float32")


def test_a_second_shard_lost_under_load_takes_the_first_along_and_both_come_back(
    start: Start, model: Path
) -> None:
    server = start(2)
    right, shard = server.answer(), server.shard
    other_shard = shard_process_of(shard)
    crowd = server.crowd(["stream", "openai whole"] * 4)
    with unloadable(model):
        os.kill(other_shard, signal.SIGKILL)
        assert_told(crowd.outcomes(), crowd.size, "shard 1 was killed by SIGKILL")
        assert_unwell(server)
    assert_returns(server, shard, right)
    assert shard_process_of(server.shard) != other_shard


def test_a_killed_router_takes_all_shards_along(start: Start) -> None:
    server = start(2)
    processes = server.everything()
    assert shard_process_of(server.shard) in processes
    os.kill(server.process.child("router"), signal.SIGKILL)
    assert server.process.wait() == ExitCode.ROUTER_FAILED
    server.assert_nothing_is_left(processes)
    lines = [json.loads(line) for line in server.process.log.splitlines()]
    assert all(set(line) == KEYS for line in lines)
    assert lines[-1]["level"] == "ERROR"
    assert lines[-1]["fields"]["message"] == "the router was killed by SIGKILL"


def test_a_launcher_killed_while_it_waits_to_start_again_leaves_nothing(start: Start) -> None:
    """Of its children only the router is there then."""
    server = start(1)
    processes = server.everything()
    os.kill(server.shard, signal.SIGKILL)
    poll(lambda: "restarting it" in server.process.log, 60, "it is lost")
    processes += server.everything()
    server.process.process.kill()
    server.process.process.wait()
    server.assert_nothing_is_left(processes)
