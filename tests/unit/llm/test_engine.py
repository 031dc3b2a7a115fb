"""The engine's threads and their callers, over a worker without a model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from tests.unit.engine.fake_worker import FakeWorker, continuation, unhurried
from tests.unit.engine.test_scheduler import limits, request
from tgi_cli.engine.messages import FinishReason
from tgi_cli.llm.engine import InProcessEngine, RequestGroup
from tgi_cli.llm.outputs import EngineDeadError


@contextmanager
def running(worker: FakeWorker, depth: int = 0) -> Iterator[InProcessEngine]:
    engine = InProcessEngine(worker, limits(), depth)
    try:
        yield engine
    finally:
        engine.close()


def read_all(group: RequestGroup) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {i: [] for i in group.live}
    while group.live:
        for update in group.receive():
            tokens[update.request_id] += update.batch.token_ids
    return tokens


@pytest.mark.parametrize("depth", [0, 1])
def test_callers_get_their_own(depth: int) -> None:
    found: dict[int, list[int]] = {}
    with running(FakeWorker(4), depth) as engine:

        def work(worker: int) -> None:
            for _ in range(5):
                with closing(RequestGroup(engine)) as group:
                    for length in range(1, 6):
                        request_id = next(engine.request_ids)
                        group.submit(request(request_id, [worker] * length, 10))
                        expected[request_id] = continuation([worker] * length, 10, 1000)
                    found.update(read_all(group))

        expected: dict[int, list[int]] = {}
        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(found) == 6 * 25
    assert found == expected


def test_a_dead_loop_raises_in_every_waiting_caller() -> None:
    gate = threading.Event()
    worker = FakeWorker(4)

    def fail(step: object) -> Exception | None:
        if len(worker.steps) <= 8:
            return None  # the callers' requests are let in
        gate.wait(60)
        return RuntimeError("the device is gone")

    worker.fail_when = fail
    # One request a step, so that others are live while the steps fail.
    engine = InProcessEngine(worker, limits(max_batch_size=1), 0)
    causes: list[str] = []
    submitted = threading.Barrier(9)

    def work(i: int) -> None:
        with closing(RequestGroup(engine)) as group:
            group.submit(request(i, [i], 100))
            submitted.wait(60)
            try:
                while group.live:
                    for update in group.receive():
                        if update.batch.finished is not None:
                            causes.append(update.batch.finished.error)
            except EngineDeadError as error:
                causes.append(f"{error.cause} ({type(error.__cause__).__name__})")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 9)]
    for thread in threads:
        thread.start()
    submitted.wait(60)
    gate.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert (
        sorted(causes)
        == ["RuntimeError: the device is gone"] * 3
        + ["the engine failed: 3 steps failed in a row (RuntimeError)"] * 5
    )
    with pytest.raises(EngineDeadError, match="3 steps failed in a row"):
        RequestGroup(engine).submit(request(100, [1], 1))
    engine.close()


def test_closing_raises_in_waiting_and_in_later_callers() -> None:
    worker = FakeWorker(4)
    unhurried(worker)
    with running(worker) as engine:
        group = RequestGroup(engine)
        group.submit(request(1, [1], 200))
        group.receive()
        engine.close()
        with pytest.raises(EngineDeadError, match="closed"):
            read_all(group)
        with pytest.raises(EngineDeadError, match="closed"):
            group.submit(request(2, [1], 1))
        group.close()
        engine.close()


def test_cancelled_requests_get_an_update_and_dropped_ones_do_not() -> None:
    worker = FakeWorker(4)
    hurry = unhurried(worker)
    with running(worker) as engine:
        group = RequestGroup(engine)
        for i in (1, 2, 3):
            group.submit(request(i, [i], 200))
        engine.cancel(2)
        group.drop(3)
        hurry.set()
        ends = {}
        while group.live:
            for update in group.receive():
                assert update.request_id != 3
                if update.batch.finished is not None:
                    ends[update.request_id] = update.batch.finished.reason
    assert ends == {1: FinishReason.LENGTH, 2: FinishReason.CANCELLED}


def test_leaving_a_call_frees_its_blocks() -> None:
    worker = FakeWorker(4)
    with running(worker) as engine:
        with closing(RequestGroup(engine)) as group:
            group.submit(request(1, [1], 200))
            group.receive()
        with closing(RequestGroup(engine)) as group:
            group.submit(request(2, [2], 3))
            assert read_all(group) == {2: continuation([2], 3, 1000)}
        steps = len(worker.steps)
        with closing(RequestGroup(engine)) as group:
            group.submit(request(3, [3], 3))
            read_all(group)
        assert all(len(step.rows) == 1 for step in worker.steps[steps:]), "request 1 is gone"
