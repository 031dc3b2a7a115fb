"""Shard 0 and a process that plays shard 1, well or badly. No model, no torch over there."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.unit.config.test_resolve import resolved
from tgi_cli.device.distributed import Shard
from tgi_cli.engine.step import Step
from tgi_cli.errors import CheckpointError, ShardError, TgiError
from tgi_cli.worker.tensor_parallel import group, shard_process
from tgi_cli.worker.tensor_parallel.group import WorkerGroup
from tgi_cli.worker.tensor_parallel.messages import RunStep

FAKE = Path(__file__).with_name("fake_shard.py")
STEP = RunStep(Step(0, rows=[0], starts=[0], counts=[1], samples=[1]))

Start = Callable[..., WorkerGroup]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    """A group with one fake shard of the given behaviour, or with one fake stage."""
    monkeypatch.setattr(group, "PING_SECONDS", 0.05)
    monkeypatch.setattr(group, "UNANSWERED", 10**6)  # a busy machine is no loss
    monkeypatch.setattr(group, "_VERDICT_SECONDS", 20.0)
    monkeypatch.setattr(Shard, "connect", lambda *_: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    started: list[WorkerGroup] = []

    def begin(behaviour: str, stages: int = 1) -> WorkerGroup:
        monkeypatch.setattr(shard_process, "COMMAND", [sys.executable, str(FAKE), behaviour])
        shards = 2 // stages
        config = resolved(num_shard=shards, pipeline_parallel_size=stages)
        started.append(WorkerGroup(config))
        return started[-1]

    yield begin
    for workers in started:
        workers.close()
        workers.close()
        assert [process.popen.poll() for process in workers.processes] != [None]
    assert list(tmp_path.iterdir()) == []


def serving(workers: WorkerGroup) -> SimpleQueue[TgiError]:
    """Connected and watched; what is lost comes out of the queue."""
    lost: SimpleQueue[TgiError] = SimpleQueue()
    workers.connect()
    workers.serve()
    workers.watch(lost.put)
    return lost


def run_into_its_end(workers: WorkerGroup) -> None:
    """A step in which shard 1 ends."""
    with workers.together():
        workers.send(STEP)
        raise RuntimeError("Connection closed by peer")


def test_a_responsive_shard_is_not_lost(start: Start) -> None:
    workers = start("well")
    lost = serving(workers)
    for _ in range(20):
        with workers.together():
            workers.send(STEP)
            time.sleep(0.02)
    workers.close()
    assert lost.empty(), "an end that was asked for is no loss"


@pytest.mark.parametrize(
    ("behaviour", "kind", "cause"),
    [
        ("refuses", CheckpointError, "shard 1: 3 missing: a, b, c"),
        ("dies at the start", ShardError, "shard 1 ended with status 3"),
        ("babbles", ShardError, "invalid message from shard 1"),
    ],
)
def test_a_failed_start_raises_the_shards_error(
    start: Start, behaviour: str, kind: type[TgiError], cause: str
) -> None:
    with pytest.raises(kind) as caught:
        start(behaviour).connect()
    assert caught.value.cause.startswith(cause)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("behaviour", "cause"),
    [
        ("is killed", "shard 1 was killed by SIGKILL"),
        ("fails", "shard 1: no memory left"),
    ],
)
def test_a_shard_lost_in_a_step_is_named(start: Start, behaviour: str, cause: str) -> None:
    """The operation's own error, which comes first, knows less."""
    workers = start(behaviour)
    lost = serving(workers)
    with pytest.raises(ShardError) as caught:
        run_into_its_end(workers)
    assert caught.value.cause == cause
    assert lost.get(timeout=60) is caught.value
    with pytest.raises(ShardError, match=cause), workers.together():
        pass


def test_a_lost_stage_is_named(start: Start) -> None:
    workers = start("is killed", stages=2)
    serving(workers)
    with pytest.raises(ShardError) as caught:
        run_into_its_end(workers)
    assert caught.value.cause == "stage 0 was killed by SIGKILL"


@pytest.mark.tgi_pain(11)
def test_a_shard_that_hangs_is_noticed_while_nothing_runs(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "UNANSWERED", 5)
    lost = serving(start("hangs"))
    assert lost.get(timeout=60).cause == "shard 1 has not answered for 0.25 s"


def test_a_loss_is_also_reported_to_later_watchers(start: Start) -> None:
    workers = start("is killed")
    serving(workers)
    with pytest.raises(ShardError):
        run_into_its_end(workers)
    late: list[TgiError] = []
    workers.watch(late.append)
    assert [error.cause for error in late] == ["shard 1 was killed by SIGKILL"]


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError("Timed out waiting 10000ms\nfor recv"), "a shard did not take part in a st"),
        (KeyError("x"), "shard 0: KeyError: 'x'"),
        (MemoryError(), "shard 0: MemoryError"),
    ],
)
def test_a_failure_on_shard_0_ends_the_other_shards(
    start: Start, monkeypatch: pytest.MonkeyPatch, error: Exception, cause: str
) -> None:
    monkeypatch.setattr(group, "_VERDICT_SECONDS", 0.01)
    workers = start("well")
    lost = serving(workers)
    with pytest.raises(ShardError) as caught, workers.together():
        raise error
    assert caught.value.cause.startswith(cause)
    assert lost.get(timeout=60) is caught.value


def test_a_shard_that_does_not_end_is_killed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_END_SECONDS", 0.1)
    workers = start("deaf")
    lost = serving(workers)
    workers.close()
    assert lost.empty()


def test_an_adapter_is_ready_once_all_shards_have_read_it(start: Start) -> None:
    workers = start("well")
    serving(workers)
    own: Future[None] = Future()
    future = workers.prepare_adapter(1, "small", "/a", own)
    refused = workers.prepare_adapter(2, "large", "/b", Future())
    with pytest.raises(TgiError, match="rank 64 is too much"):
        refused.result(timeout=60)
    assert not future.done(), "this shard does not hold it yet"
    own.set_result(None)
    assert future.result(timeout=60) is None


def test_an_adapter_being_read_fails_with_the_shard(start: Start) -> None:
    workers = start("is killed")
    serving(workers)
    future = workers.prepare_adapter(1, "small", "/a", Future())
    with pytest.raises(ShardError):
        run_into_its_end(workers)
    with pytest.raises(ShardError, match="SIGKILL"):
        future.result(timeout=60)
