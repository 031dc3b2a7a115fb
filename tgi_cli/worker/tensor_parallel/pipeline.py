"""A worker whose model is in several stages; this process has the last one, which chooses tokens.

After vLLM's batch queue and SGLang's micro batches: as many steps are in flight as there are
stages, of different sequences, so that each stage computes one while the others compute theirs.
The chosen tokens are known to this process, which schedules, and go to the first stage with the
next step of their sequences. Hidden states go from stage to stage alone, and nothing goes back.

On a CPU, this process's part of a step takes its thread, and waits for the stage before. It is
computed when the result is requested; until then, later steps are sent to the other stages. On CUDA
devices it is launched at once, since the device waits for both instead of the thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tgi_cli.engine.step import PendingResult, Step, StepResult
from tgi_cli.worker.tensor_parallel.group import WorkerGroup
from tgi_cli.worker.tensor_parallel.messages import RunStep
from tgi_cli.worker.tensor_parallel.worker import ShardedWorker
from tgi_cli.worker.worker import ModelWorker

Masks = tuple[Sequence[int], Any] | None


class PipelinedWorker(ShardedWorker):
    """As :class:`ShardedWorker`, over all stages. Wait for results in the order of the launches.

    Args:
        own: this process's shard of the last stage.
        group: the other processes, connected.
    """

    def __init__(self, own: ModelWorker, group: WorkerGroup) -> None:
        super().__init__(own, group)
        self._defers = group.shard.device.type == "cpu"

    def launch(self, step: Step) -> object:
        if not self._defers:
            return super().launch(step)
        with self._group.together():
            self._group.send(RunStep(step))
        return step

    def sample(self, handle: object, masks: Masks = None) -> PendingResult:
        if not self._defers:
            return super().sample(handle, masks)
        assert isinstance(handle, Step)
        if masks is not None:  # the compiler fills the same memory again for the next step
            masks = (list(masks[0]), np.array(masks[1]))
        return _DeferredStep(self._own, self._group, handle, masks)


class _DeferredStep:
    """A step that the other stages compute, and whose last part is still to be computed."""

    def __init__(self, own: ModelWorker, group: WorkerGroup, step: Step, masks: Masks) -> None:
        self._own = own
        self._group = group
        self._step = step
        self._masks = masks

    def wait(self) -> StepResult:
        with self._group.together():
            handle = self._own.launch(self._step)
            return self._own.sample(handle, self._masks).wait()
