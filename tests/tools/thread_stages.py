"""A model in pipeline stages, in the threads of one process that communicate over gloo, for tests.

Threads do what processes would, but for their start, which takes seconds for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from queue import Queue
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from tgi_cli.config import EngineConfig
from tgi_cli.device.distributed import Shard
from tgi_cli.worker.factory import make_worker
from tgi_cli.worker.sizing.kv_cache import Capacity
from tgi_cli.worker.tensor_parallel import messages
from tgi_cli.worker.tensor_parallel.group import WorkerGroup
from tgi_cli.worker.tensor_parallel.pipeline import PipelinedWorker

T = TypeVar("T")

SECONDS = 60.0


def on_stages(stages: int, size: int, work: Callable[[Shard], T]) -> list[T]:
    """What ``work`` returns in each process of ``stages`` with ``size`` shards, by its number."""

    def run(number: int) -> T:
        shard = Shard.of_process(number, size, stages, torch.device("cpu"))
        shard.connect(store, SECONDS)
        result = work(shard)
        shard.smallest(0)  # what one has sent is lost with its groups
        return result

    store = dist.HashStore()
    with ThreadPoolExecutor(stages * size) as threads:
        futures = [threads.submit(run, number) for number in range(stages * size)]
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            future.result()  # the first error: those of the others follow from it
        return [future.result() for future in futures]


def with_pipeline(
    config: EngineConfig, size: int, use: Callable[[PipelinedWorker, Capacity], T]
) -> T:
    """What ``use`` returns of the worker of all stages, warmed up, with ``size`` shards each."""
    config = replace(config, num_shard=size)
    others = range(1, config.num_processes)
    commands: dict[int, Queue[bytes | None]] = {number: Queue() for number in others}

    def work(shard: Shard) -> list[T]:
        worker = make_worker(config, shard)
        try:
            capacity = worker.warmup()
            if shard.leads:
                group = cast(WorkerGroup, _Commands(shard, commands))
                return [use(PipelinedWorker(worker, group), capacity)]
            while (data := commands[shard.process].get(timeout=SECONDS)) is not None:
                command = messages.decode_command(data)
                assert isinstance(command, messages.RunStep)
                worker.sample(worker.launch(command.step))
            return []
        finally:
            worker.close()
            if shard.leads:
                for queue in commands.values():
                    queue.put(None)

    return on_stages(config.pipeline_parallel_size, size, work)[0][0]


class _Commands:
    """What a PipelinedWorker uses of a WorkerGroup."""

    def __init__(self, shard: Shard, commands: dict[int, Queue[bytes | None]]) -> None:
        self.shard = shard
        self._commands = commands

    def send(self, command: Any) -> None:
        for queue in self._commands.values():
            queue.put(messages.encode(command))

    def places(self) -> tuple[str, ...]:
        return ()

    @contextmanager
    def together(self) -> Iterator[None]:
        yield
