"""Node 0 and another node in one process, with fake processes of the model; and strangers."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from tests.tools.process_tree import children_of, command_of, is_gone
from tests.tools.server_process import free_ports, poll
from tests.unit.config.test_resolve import CPU, MODEL
from tests.unit.worker.test_worker_group import STEP, run_into_its_end
from tgi_cli.config import EngineConfig, ServeConfig, resolve
from tgi_cli.device.distributed import Shard
from tgi_cli.errors import ConfigError, ShardError, TgiError
from tgi_cli.process.authenticated_channel import connect
from tgi_cli.worker.tensor_parallel import group, node_agent, shard_process
from tgi_cli.worker.tensor_parallel.group import WorkerGroup
from tgi_cli.worker.tensor_parallel.node_agent import NodeAgent
from tgi_cli.worker.tensor_parallel.node_listener import NodeListener
from tgi_cli.worker.tensor_parallel.node_messages import (
    JoinProcess,
    Refused,
    decode_answer,
    encode_node_message,
)

SECONDS = 120.0
SECRET = "0123456789abcdef"
FAKE = Path(__file__).with_name("fake_node_process.py")


class Nodes:
    """Settings of both nodes, and what was started of them."""

    def __init__(self, folder: Path, threads: ThreadPoolExecutor) -> None:
        self.folder = folder
        model, secret = folder / "model", folder / "secret"
        model.mkdir()
        (model / "config.json").write_text("{}")
        secret.write_text(SECRET)
        secret.chmod(0o600)
        (self.port,) = free_ports(1)
        self.serve = ServeConfig(
            model_id="m",
            pipeline_parallel_size=2,
            nnodes=2,
            master_addr="127.0.0.1",
            master_port=self.port,
            node_secret_file=secret,
        )
        self._threads = threads
        self._agents: list[NodeAgent] = []
        self._groups: list[WorkerGroup] = []

    @property
    def config(self) -> EngineConfig:
        return resolve(self.serve, MODEL, CPU, self.folder / "model")

    def join(self, folder: str = "model", secret: str = SECRET, **said: Any) -> Future[None]:
        """Start node 1, in a thread."""
        serve = replace(self.serve, node_rank=1, **said)
        agent = NodeAgent(serve, self.folder / folder, secret.encode())
        self._agents.append(agent)
        return self._threads.submit(agent.run)

    def start(self) -> WorkerGroup:
        """Start node 0."""
        workers = WorkerGroup(self.config, NodeListener(self.serve, self.config))
        self._groups.append(workers)
        return workers

    def close(self) -> None:
        for agent in self._agents:
            agent.stop()
        for workers in self._groups:
            workers.close()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Nodes]:
    monkeypatch.setattr(group, "PING_SECONDS", 0.05)
    monkeypatch.setattr(group, "UNANSWERED", 10**6)  # a busy machine is no loss
    monkeypatch.setattr(group, "_VERDICT_SECONDS", SECONDS)
    monkeypatch.setattr(shard_process, "_REAP_SECONDS", SECONDS)
    monkeypatch.setattr(node_agent, "_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(Shard, "connect", lambda *_: None)
    behave(monkeypatch, "well")
    with ThreadPoolExecutor(4) as threads:
        found = Nodes(tmp_path, threads)
        yield found
        found.close()


def behave(monkeypatch: pytest.MonkeyPatch, behaviour: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.setattr(node_agent, "_COMMAND", [sys.executable, str(FAKE), behaviour])


def processes_of_node_1() -> list[int]:
    return [pid for pid in children_of(os.getpid()) if FAKE.name in command_of(pid)]


def serving(workers: WorkerGroup) -> SimpleQueue[TgiError]:
    lost: SimpleQueue[TgiError] = SimpleQueue()
    workers.connect()
    workers.serve()
    workers.watch(lost.put)
    return lost


def test_a_node_serves_one_model_server_after_the_other(nodes: Nodes) -> None:
    joined = nodes.join()
    for _ in range(2):
        workers = nodes.start()
        lost = serving(workers)
        with workers.together():
            workers.send(STEP)
        assert workers.places() == ("stage 1 on node 0", "stage 0 on node 1 (127.0.0.1)")
        with pytest.raises(ConnectionRefusedError):  # it listens no longer
            poll(
                lambda: socket.create_connection(("127.0.0.1", nodes.port)).close(),
                SECONDS,
                "closed",
            )
        (pid,) = processes_of_node_1()
        workers.close()
        assert lost.empty(), "an end that was asked for is no loss"
        poll(lambda pid=pid: is_gone(pid), SECONDS, "its process ends")  # type: ignore[misc]
    assert not joined.done()


@pytest.mark.parametrize(
    ("behaviour", "cause"),
    [
        ("is killed", "stage 0 on node 1 was killed by SIGKILL"),
        ("fails", "stage 0 on node 1: no memory left"),
    ],
)
def test_a_lost_process_is_named_with_its_node(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, behaviour: str, cause: str
) -> None:
    behave(monkeypatch, behaviour)
    nodes.join()
    workers = nodes.start()
    lost = serving(workers)
    with pytest.raises(ShardError) as caught:
        run_into_its_end(workers)
    assert caught.value.cause == cause
    assert lost.get(timeout=SECONDS) is caught.value


def test_a_process_that_fails_at_the_start_is_named(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave(monkeypatch, "refuses")
    nodes.join()
    with pytest.raises(TgiError, match="stage 0 on node 1: 3 missing: a, b, c"):
        nodes.start().connect()


def test_a_process_that_does_not_start_is_named(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_agent, "_COMMAND", [sys.executable, "-c", "raise SystemExit(3)"])
    nodes.join()
    with pytest.raises(ShardError, match="stage 0 on node 1 ended with status 3"):
        nodes.start().connect()


def test_a_node_logs_that_it_cannot_start_processes(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Instead of blaming its connection to node 0, which then finds it gone."""
    monkeypatch.setattr(node_agent, "_COMMAND", [str(nodes.folder / "missing")])
    nodes.join()
    with pytest.raises(ShardError, match=r"node 1 \(127\.0\.0\.1\) is gone"):
        nodes.start().connect()
    assert "the processes of this node cannot be started: [Errno 2]" in caplog.text


def test_a_stopped_process_is_noticed_and_killed(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.join()
    lost = serving(nodes.start())
    (pid,) = processes_of_node_1()
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(group, "UNANSWERED", 5)
    assert lost.get(timeout=SECONDS).cause == "stage 0 on node 1 has not answered for 0.25 s"
    poll(lambda: is_gone(pid), SECONDS, "its node kills it")


def test_a_node_that_ends_is_named(nodes: Nodes) -> None:
    joined = nodes.join()
    lost = serving(nodes.start())
    nodes._agents[0].stop()
    joined.result(SECONDS)
    cause = lost.get(timeout=SECONDS).cause
    # Its connection, or that of its process, is the first to end.
    assert cause in ("node 1 (127.0.0.1) is gone", "stage 0 on node 1 is gone") or (
        cause.startswith("stage 0 on node 1 ended")
    )


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ({"dtype": "float16"}, "other settings than node 0: --dtype float16 instead of unset"),
        ({"revision": "abc"}, "node 1 has revision abc of the model, and node 0 has unknown"),
        ({"folder": "other"}, "node 1 has other files of the model than node 0: config.json"),
        ({"nnodes": 3}, "--nnodes 3 instead of 2"),
        ({"secret": "another secret!!"}, "it has another secret"),
    ],
)
def test_a_node_that_does_not_fit_is_refused(
    nodes: Nodes, said: dict[str, Any], cause: str
) -> None:
    """And does not disturb one that does."""
    (nodes.folder / "other").mkdir()
    (nodes.folder / "other" / "config.json").write_text("[]")
    workers = nodes.start()
    with pytest.raises(ConfigError) as caught:
        nodes.join(**said).result(SECONDS)
    assert cause in caught.value.cause
    assert caught.value.remedy
    nodes.join()
    workers.connect()


def test_nodes_of_other_versions_are_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.start()
    with monkeypatch.context() as other:
        other.setattr("tgi_cli.worker.tensor_parallel.node_identity.__version__", "9.9")
        with pytest.raises(ConfigError, match=r"a node has version 9\.9 of this package"):
            nodes.join().result(SECONDS)
    channel = connect("127.0.0.1", nodes.port, SECRET.encode(), SECONDS)
    channel.send(b'{"type":"node","version":"8","new":[]}')
    answer = channel.receive()
    assert answer is not None
    refused = decode_answer(answer)
    assert isinstance(refused, Refused)
    assert "version 8" in refused.cause


def test_a_second_node_of_a_rank_is_refused(nodes: Nodes) -> None:
    workers = nodes.start()
    nodes.join()
    poll(lambda: len(workers.places()) == 2, SECONDS, "node 1 joins")
    with pytest.raises(ConfigError, match=r"node 1 \(127.0.0.1\) is connected already"):
        nodes.join().result(SECONDS)
    workers.connect()


def test_strangers_neither_join_nor_disturb(nodes: Nodes) -> None:
    workers = nodes.start()
    address = ("127.0.0.1", nodes.port)
    strangers = [socket.create_connection(address) for _ in range(8)]
    for number, stranger in enumerate(strangers):
        if number % 4 == 1:
            stranger.sendall(b"\0" * 4096)
        elif number % 4 == 2:
            stranger.sendall(b"tgi channel 1\n" + bytes(64))
        elif number % 4 == 3:
            stranger.close()
    # One that knows the secret, and guesses at the rest.
    known = connect(*address, SECRET.encode(), SECONDS)
    known.send(encode_node_message(JoinProcess("guessed", 1, "commands")))
    assert known.receive() is None
    odd = connect(*address, SECRET.encode(), SECONDS)
    odd.send(b"\xff" * 100)
    assert odd.receive() is not None, "a refusal"
    nodes.join()
    lost = serving(workers)
    with workers.together():
        workers.send(STEP)
    assert lost.empty()
    assert b"secret" not in b"".join(stranger.recv(1000) for stranger in strangers[:1])
