"""One run of the whole engine over a miniature, in which as much as possible is reused.

A budget smaller than the prompts cuts them anywhere, and a pool of few blocks preempts. Some
prompts share beginnings, two are asked for three samples each, and the last answer gets a second
turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any, TypeVar

from tests.tools.thread_shards import on_shards
from tests.tools.thread_stages import with_pipeline
from tests.unit.engine.test_core import Client
from tgi_cli.config import BLOCK_SIZE, EngineConfig, ServeConfig, resolve
from tgi_cli.device.distributed import Shard
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.core import EngineCore
from tgi_cli.engine.messages import GenerationRequest, Shutdown
from tgi_cli.engine.step import Step
from tgi_cli.kernels.facts import describe_device
from tgi_cli.models import model_facts, read_config
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.factory import load_worker, make_worker
from tgi_cli.worker.sizing.kv_cache import Capacity
from tgi_cli.worker.tensor_parallel import messages
from tgi_cli.worker.worker import ModelWorker

T = TypeVar("T")

SERVED = 192
"""Tokens that a sequence may have in all."""

CHUNK = 24
"""Tokens of a prefill step of the engine; windows are longer, prompts longer still."""

NEW = 32
"""Tokens asked for per request."""

NEW_ON_SHARDS = 12
"""The same, on several shards."""

NEW_ON_STAGES = 16
"""The same, on several stages: enough that the pool is too small for steps of several."""

NUM_BLOCKS = 9
"""Of the engine's pool: its requests together want more."""

NEW_IN_TURN = 8
"""The same, in a second turn."""

SAMPLED = (1, 4)
"""Indices of the prompts that get three samples."""

ON_SHARDS = (0, 3, 4)
"""Indices of the prompts that several shards are given; the first and last get three samples."""

_TURN = 1000
"""The request of the second turn; further samples have 100 and 200 more than the first."""


@dataclass(frozen=True, slots=True)
class EngineRun:
    """What an engine made of prompts.

    Attributes:
        answers: token ids, in the order of the prompts.
        samples: further answers to some prompts, two for each.
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


def run_engine(
    path: Path,
    prompts: list[list[int]],
    sampled: Sequence[int] = SAMPLED,
    num_shard: int = 1,
    stages: int = 1,
    processes: bool = False,
) -> EngineRun:
    """Generate greedily from the checkpoint in ``path``.

    ``sampled`` are the indices of prompts that get three samples. Shards are threads of this
    process, of which those of several stages communicate over gloo, or ``processes``.
    """
    serve = ServeConfig(
        model_id="miniature",
        dtype="float32",
        max_total_tokens=SERVED,
        max_batch_prefill_tokens=CHUNK,
        max_batch_total_tokens=1024,
        max_batch_size=8,
        speculate=0,  # nothing drafts here: the warm-up need not time it
        pipeline_parallel_size=stages,
        num_shard=num_shard if processes else None,
    )
    new = NEW_ON_STAGES if stages > 1 else NEW_ON_SHARDS if num_shard > 1 else NEW

    def use(worker: Any, found: Capacity) -> EngineRun:
        return _run(worker, found, prompts, sampled, new)

    if processes:
        worker, _ = load_worker(serve, path)
        try:
            return use(worker, worker.warmup())
        finally:
            worker.close()
    if stages > 1:
        return with_pipeline(_resolved(path, serve), num_shard, use)
    return with_worker(path, serve, num_shard, use)


def with_worker(
    path: Path, serve: ServeConfig, num_shard: int, use: Callable[[Any, Capacity], T]
) -> T:
    """What a function returns that is given a worker, warmed up; shards are threads.

    Args:
        path: folder of the checkpoint.
        serve: settings.
        num_shard: of the worker.
        use: called with the worker of shard 0, which hands on each step, and its capacity.
    """
    config = _resolved(path, serve)
    if num_shard == 1:
        worker = make_worker(config)
        try:
            return use(worker, worker.warmup())
        finally:
            worker.close()
    steps: Queue[bytes | None] = Queue()

    def work(shard: Shard) -> list[T]:
        worker = make_worker(config, shard)
        capacity = worker.warmup()
        if shard.rank > 0:
            while (command := steps.get(timeout=60)) is not None:
                worker.sample(worker.launch(_step_of(command)))
            worker.close()
            return []
        try:
            return [use(_Leading(worker, steps), capacity)]
        finally:
            worker.close()
            for _ in range(num_shard - 1):
                steps.put(None)

    (used,) = on_shards(num_shard, work)[0]
    return used


def _resolved(path: Path, serve: ServeConfig) -> EngineConfig:
    return resolve(serve, model_facts(read_config(path)), describe_device(None), path)


def _step_of(encoded: bytes) -> Step:
    command = messages.decode_command(encoded)
    assert isinstance(command, messages.RunStep)
    return command.step


class _Leading:
    """The worker of shard 0, which hands on each step."""

    def __init__(self, own: ModelWorker, steps: Queue[bytes | None]) -> None:
        self._own = own
        self._steps = steps

    def launch(self, step: Step) -> object:
        self._steps.put(messages.encode(messages.RunStep(step)))
        return self._own.launch(step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def _run(
    worker: Any, capacity: Capacity, prompts: list[list[int]], sampled: Sequence[int], new: int
) -> EngineRun:
    limits = SchedulerConfig(
        max_total_tokens=SERVED,
        max_batch_prefill_tokens=CHUNK,
        max_batch_size=8,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        window=capacity.kv_window,
        num_state_slots=capacity.num_state_slots,
        pipeline_parallel_size=capacity.config.pipeline_parallel_size,
    )
    core = EngineCore(worker, limits, capacity.config.depth)
    asked = [_ask(i, prompt, new) for i, prompt in enumerate(prompts)]
    further = [_ask(100 * n + i, prompts[i], new, fork_of=i) for i in sampled for n in (1, 2)]
    for request in (*asked, *further):
        core.inbox.put(request)
    with running(core) as client:
        client.read_until_finished(*(request.request_id for request in (*asked, *further)))
        last = next(i for i in reversed(client.finished) if i < len(prompts))
        turn = [*prompts[last], *client.tokens[last], *range(40, 43)]
        before = core.metrics.load.reused_tokens
        core.inbox.put(_ask(_TURN, turn, NEW_IN_TURN))
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
def running(core: EngineCore) -> Iterator[Client]:
    """A client of the engine, which runs in a thread until the block ends."""
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
