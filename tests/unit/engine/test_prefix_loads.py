"""Prefixes that are kept outside of the cache, and sequences that wait for them."""

from __future__ import annotations

import threading
from typing import Any

from tests.tools.server_process import poll
from tests.unit.engine.fake_blocks import FakeBlockStore
from tests.unit.engine.fake_worker import FakeWorker, continuation
from tests.unit.engine.test_scheduler import limits, request
from tgi_cli.engine.core import EngineCore
from tgi_cli.engine.messages import Shutdown
from tgi_cli.engine.scheduler import Scheduler

PROMPT = list(range(33))


def scheduler(store: FakeBlockStore | None = None) -> tuple[Scheduler, FakeWorker, FakeBlockStore]:
    """One with an empty cache, and a worker without KV; ``store`` survives."""
    bounds = limits(max_batch_prefill_tokens=16)
    worker = FakeWorker.of(bounds)
    if store is None:
        store = FakeBlockStore(worker)
    store.worker = worker
    return Scheduler(bounds, blocks=store), worker, store


def finish(scheduler: Scheduler, worker: FakeWorker) -> dict[int, list[int]]:
    """Run until nothing can be scheduled; the tokens by request."""
    tokens: dict[int, list[int]] = {}
    while (step := scheduler.schedule()) is not None:
        outputs = scheduler.update(worker.sample(worker.launch(step)).wait())
        for request_id, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
            tokens.setdefault(request_id, []).append(token)
    return tokens


def computed(worker: FakeWorker) -> int:
    return sum(step.num_prefill_tokens for step in worker.steps)


def kept(prompt: list[int] = PROMPT, **more: Any) -> FakeBlockStore:
    """A store with the blocks of a prompt and an answer of 8 tokens."""
    engine, worker, store = scheduler()
    assert engine.add(request(1, prompt, 8, **more)) is None
    finish(engine, worker)
    return store


def test_prompt_and_answer_are_found_after_a_restart() -> None:
    store = kept()
    assert len(store.saved) == 10, "40 tokens have keys and values"
    assert store.touched[:10] == list(store.saved)
    engine, worker, _ = scheduler(store)
    turn = PROMPT + continuation(PROMPT, 8, 1000) + [7, 8, 9]
    engine.add(request(2, turn, 4))
    assert engine.schedule() is None, "it waits for its blocks"
    store.pending[0].finish(100)
    assert finish(engine, worker) == {2: continuation(turn, 4, 1000)}
    assert computed(worker) == len(turn) - 40
    assert engine.load().reused_tokens == 40


def test_others_run_meanwhile() -> None:
    store = kept()
    engine, worker, _ = scheduler(store)
    engine.add(request(2, PROMPT, 4))
    engine.add(request(3, [5, 6], 4))
    assert finish(engine, worker) == {3: continuation([5, 6], 4, 1000)}
    store.pending[0].finish(100)
    assert finish(engine, worker) == {2: continuation(PROMPT, 4, 1000)}


def test_a_lost_block_ends_the_run() -> None:
    store = kept()
    engine, worker, _ = scheduler(store)
    engine.add(request(2, PROMPT, 4))
    assert engine.schedule() is None
    del store.saved[list(store.saved)[2]]
    store.pending[0].finish(100)
    assert finish(engine, worker) == {2: continuation(PROMPT, 4, 1000)}
    assert computed(worker) == len(PROMPT) - 8


def test_a_cancelled_request_gives_up_what_is_read_for_it() -> None:
    store = kept()
    engine, _, _ = scheduler(store)
    engine.add(request(2, PROMPT, 4))
    assert engine.schedule() is None
    engine.batch.cancel(2)
    assert store.reads[0].taken


def test_blocks_are_offered_again_when_the_store_was_busy() -> None:
    engine, worker, store = scheduler()
    store.busy = True
    engine.add(request(1, PROMPT, 8))
    for _ in range(3):
        step = engine.schedule()
        assert step is not None
        engine.update(worker.sample(worker.launch(step)).wait())
    assert not store.saved
    store.busy = False
    finish(engine, worker)
    assert len(store.saved) == 10


def test_salts_part_prefixes() -> None:
    store = kept(cache_salt=b"one")
    engine, worker, _ = scheduler(store)
    engine.add(request(2, PROMPT, 4, cache_salt=b"two"))
    assert finish(engine, worker) == {2: continuation(PROMPT, 4, 1000)}
    assert not store.reads


def test_the_loop_waits_for_reads() -> None:
    store = kept()
    bounds = limits(max_batch_prefill_tokens=16)
    store.worker = worker = FakeWorker.of(bounds)
    core = EngineCore(worker, bounds, blocks=store)
    loop = threading.Thread(target=core.run)
    loop.start()
    core.inbox.put(request(2, PROMPT, 4))
    poll(lambda: store.pending and core.progress > 3, 20, "it waits")
    assert not worker.steps
    store.pending[0].finish(100)
    tokens: list[int] = []
    while len(tokens) < 4:
        outputs = core.outbox.get(timeout=60)
        assert outputs is not None
        tokens += outputs.token_ids
    core.inbox.put(Shutdown())
    loop.join()
    assert tokens == continuation(PROMPT, 4, 1000)
    assert computed(worker) == 1
