"""A worker whose model is spread over several processes; this one is shard 0."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from tgi_cli.config import EngineConfig
from tgi_cli.engine.messages import EngineInfo
from tgi_cli.engine.step import PendingResult, Step, StepResult
from tgi_cli.errors import TgiError
from tgi_cli.worker.grammar import LLGuidance
from tgi_cli.worker.sizing.capacity import Capacity
from tgi_cli.worker.tensor_parallel.group import WorkerGroup
from tgi_cli.worker.tensor_parallel.messages import ForgetAdapter, RunStep
from tgi_cli.worker.worker import ModelWorker, make_worker

log = logging.getLogger(__name__)


def load_sharded(
    config: EngineConfig,
    progress: Callable[[int, int], None] | None = None,
) -> ShardedWorker:
    """Load a model's shards, side by side; see :func:`tgi_cli.worker.worker.load_worker`."""
    log.info("starting %d shards", config.num_shard)
    followers = WorkerGroup(config)
    try:
        own = make_worker(config, followers.shard, progress)
        followers.connect()
    except BaseException:  # an error of any kind, SIGTERM's SystemExit, Ctrl-C
        followers.close()
        raise
    return ShardedWorker(own, followers)


class ShardedWorker:
    """Implements :class:`tgi_cli.engine.step.Worker` as :class:`ModelWorker` does, on all shards.

    Whatever fails in a step is a ShardError: the shards do not stand at the same place any more.

    Args:
        own: this process's shard.
        followers: the others, connected.
    """

    def __init__(self, own: ModelWorker, followers: WorkerGroup) -> None:
        self._own = own
        self._followers = followers

    def launch(self, step: Step) -> object:
        with self._followers.together():
            self._followers.send(RunStep(step))
            return self._own.launch(step)

    def sample(
        self, handle: object, masks: tuple[Sequence[int], Any] | None = None
    ) -> PendingResult:
        with self._followers.together():
            return _Pending(self._own.sample(handle, masks), self._followers)

    @property
    def grammars(self) -> LLGuidance | None:
        """Those of this process, which alone chooses tokens."""
        return self._own.grammars

    def prepare_adapter(self, adapter_id: int, name: str, path: str) -> Future[None]:
        """Done when all shards hold it."""
        own = self._own.prepare_adapter(adapter_id, name, path)
        return self._followers.prepare_adapter(adapter_id, name, path, own)

    def forget_adapter(self, adapter_id: int) -> None:
        with self._followers.together():
            self._followers.send(ForgetAdapter(adapter_id))
        self._own.forget_adapter(adapter_id)

    def warmup(self) -> Capacity:
        """Raises TgiError of this shard, or of the one that failed."""
        try:
            with self._followers.starting():
                capacity = self._own.warmup()
                self._followers.serve()
        except BaseException:
            self.close()
            raise
        return capacity

    def info(self) -> EngineInfo:
        return self._own.info()

    def read_bytes(self, rows: int) -> int:
        """Of weights, by a decode of so many sequences, on all shards."""
        return self._own.read_bytes(rows)

    def watch(self, on_lost: Callable[[TgiError], None]) -> None:
        """Have ``on_lost`` called, from any thread, if a shard is lost."""
        self._followers.watch(on_lost)

    def close(self) -> None:
        """End the other shards. May be called twice."""
        self._followers.close()
        self._own.close()


class _Pending:
    """A result that does not come if a shard is lost."""

    def __init__(self, pending: PendingResult, followers: WorkerGroup) -> None:
        self._pending = pending
        self._followers = followers

    def wait(self) -> StepResult:
        with self._followers.together():
            return self._pending.wait()
