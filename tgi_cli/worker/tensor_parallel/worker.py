"""A worker whose model is split over several processes; this one is shard 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tgi_cli.engine.messages import EngineInfo
from tgi_cli.engine.step import PendingResult, Step, StepResult
from tgi_cli.errors import TgiError
from tgi_cli.worker.sizing.kv_cache import Capacity
from tgi_cli.worker.tensor_parallel.group import WorkerGroup
from tgi_cli.worker.tensor_parallel.messages import ForgetAdapter, RunStep
from tgi_cli.worker.worker import ModelWorker

if TYPE_CHECKING:
    from tgi_cli.worker.lazy_grammars import LazyGrammars


class ShardedWorker:
    """Implements :class:`tgi_cli.engine.step.Worker` as :class:`ModelWorker` does, on all shards.

    Any failure in a step is a ShardError, since the shards are out of step after it.

    Args:
        own: this process's shard.
        group: the other shards, connected.
    """

    def __init__(self, own: ModelWorker, group: WorkerGroup) -> None:
        self._own = own
        self._group = group

    def launch(self, step: Step) -> object:
        with self._group.together():
            self._group.send(RunStep(step))
            return self._own.launch(step)

    def sample(
        self, handle: object, masks: tuple[Sequence[int], Any] | None = None
    ) -> PendingResult:
        with self._group.together():
            return _Pending(self._own.sample(handle, masks), self._group)

    @property
    def grammars(self) -> LazyGrammars | None:
        """The compiler of this process, which alone samples."""
        return self._own.grammars

    def prepare_adapter(self, adapter_id: int, name: str, path: str) -> Future[None]:
        """Done when all shards have read it."""
        own = self._own.prepare_adapter(adapter_id, name, path)
        return self._group.prepare_adapter(adapter_id, name, path, own)

    def forget_adapter(self, adapter_id: int) -> None:
        with self._group.together():
            self._group.send(ForgetAdapter(adapter_id))
        self._own.forget_adapter(adapter_id)

    def warmup(self) -> Capacity:
        """Raises TgiError of this shard, or of the one that failed."""
        try:
            with self._group.starting():
                capacity = self._own.warmup()
                self._group.serve(capacity.step_seconds)
        except BaseException:
            self.close()
            raise
        return capacity

    def info(self) -> EngineInfo:
        return replace(self._own.info(), nodes=self._group.places())

    def read_bytes(self, rows: int) -> int:
        """Bytes of weights that a decode of ``rows`` sequences reads, over all shards."""
        return self._own.read_bytes(rows)

    def watch(self, on_lost: Callable[[TgiError], None]) -> None:
        """Call ``on_lost``, from any thread, if a shard is lost."""
        self._group.watch(on_lost)

    def close(self) -> None:
        """End the other shards. May be called twice."""
        self._group.close()
        self._own.close()


class _Pending:
    """A result that raises ShardError if a shard is lost."""

    def __init__(self, pending: PendingResult, group: WorkerGroup) -> None:
        self._pending = pending
        self._group = group

    def wait(self) -> StepResult:
        with self._group.together():
            return self._pending.wait()
