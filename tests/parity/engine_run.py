"""One run of the whole engine over a miniature, in which as much as possible is reused.

A budget smaller than the prompts cuts them anywhere, and a pool of few blocks preempts. Some
prompts share beginnings, two are asked for three samples each, and the last answer gets a second
turn. On several shards, each is a thread with an engine of its own: all are given the same requests
before they start, and so take the same steps.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.tools.thread_shards import on_shards
from tests.unit.engine.test_core import Client
from tgi_cli.config import BLOCK_SIZE, ServeConfig, resolve
from tgi_cli.device import describe
from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.core import EngineCore
from tgi_cli.engine.messages import GenerationRequest, Shutdown
from tgi_cli.models import model_facts, read_config
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.factory import make_worker

SERVED = 192
"""Tokens that a sequence may have in all."""

CHUNK = 24
"""Tokens of a prefill step of the engine; windows are longer, prompts longer still."""

NUM_BLOCKS = 9
"""Of the engine's pool: its requests together want several times as many."""

NEW = 32
"""Tokens asked for per request."""

SAMPLED = (1, 4)
"""Indices of the prompts that get three samples."""

_TURN = 1000
"""The request of the second turn; further samples have 100 and 200 more than the first."""


@dataclass(frozen=True, slots=True)
class EngineRun:
    """What an engine made of prompts.

    Attributes:
        answers: token ids, in the order of the prompts.
        samples: further answers to the prompts :data:`SAMPLED`, two for each.
        turn: prompt of the second turn: an earlier one, its answer, and some more.
        turn_answer: to that.
        preemptions: how often a sequence lost its blocks.
        reused: tokens of the second turn that were not computed again.
    """

    answers: list[list[int]]
    samples: list[list[int]]
    turn: list[int]
    turn_answer: list[int]
    preemptions: int
    reused: int


def run_engine(path: Path, prompts: list[list[int]], shard: Shard = ALONE) -> EngineRun:
    """Generate greedily from the checkpoint in ``path``, on one shard."""
    serve = ServeConfig(
        model_id="miniature",
        dtype="float32",
        max_total_tokens=SERVED,
        max_batch_prefill_tokens=CHUNK,
        max_batch_total_tokens=1024,
        max_batch_size=8,
    )
    config = resolve(serve, model_facts(read_config(path)), describe(None), path)
    worker = make_worker(config, shard)
    capacity = worker.warmup()
    limits = SchedulerConfig(
        max_total_tokens=SERVED,
        max_batch_prefill_tokens=CHUNK,
        max_batch_size=8,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        window=capacity.kv_window,
        num_state_slots=capacity.num_state_slots,
    )
    core = EngineCore(worker, limits)
    asked = [_ask(i, prompt, NEW) for i, prompt in enumerate(prompts)]
    further = [_ask(100 * n + i, prompts[i], NEW, fork_of=i) for i in SAMPLED for n in (1, 2)]
    for request in (*asked, *further):
        core.inbox.put(request)
    with _running(core) as client:
        client.read_until_finished(*(request.request_id for request in (*asked, *further)))
        last = next(i for i in reversed(client.finished) if i < len(prompts))
        turn = [*prompts[last], *client.tokens[last], *range(40, 45)]
        before = core.metrics.load.reused_tokens
        core.inbox.put(_ask(_TURN, turn, NEW // 2))
        client.read_until_finished(_TURN)
        load = core.metrics.load
    return EngineRun(
        answers=[client.tokens[request.request_id] for request in asked],
        samples=[client.tokens[request.request_id] for request in further],
        turn=turn,
        turn_answer=client.tokens[_TURN],
        preemptions=load.preemptions,
        reused=load.reused_tokens - before,
    )


def run_sharded_engine(path: Path, prompts: list[list[int]], size: int) -> list[EngineRun]:
    """The same on each of ``size`` shards."""
    return on_shards(size, lambda shard: run_engine(path, prompts, shard))


def _ask(
    request_id: int, prompt: list[int], new: int, fork_of: int | None = None
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(temperature=0.0),
        max_new_tokens=new,
        ignore_eos=True,
        fork_of=fork_of,
    )


@contextmanager
def _running(core: EngineCore) -> Iterator[Client]:
    thread = threading.Thread(target=core.run, daemon=True)
    thread.start()
    client = Client(core)
    try:
        yield client
    finally:
        core.inbox.put(Shutdown())
        while client.read() is not None:
            pass
        thread.join(timeout=60)
