"""When waiting sequences may join: one policy per :class:`~tgi_cli.engine.config.Batching`."""

from __future__ import annotations

from tgi_cli.engine.config import Batching, SchedulerConfig

Window = tuple[int, int]


class BatchingPolicy:
    """Fused batching: sequences join at any step. The others derive from it.

    Attributes:
        mixes: prefills share a step with decodes.
        strict: prompts run whole, and none overtakes one that does not fit.
        gathers: a whole batch is admitted at once, though its prefill may take several steps.
        join_reason: why sequences may join a running batch now, in TGI's words.
    """

    mixes, strict, gathers = True, False, False
    join_reason = "chunking"

    def __init__(self, config: SchedulerConfig) -> None:
        self._size = config.max_batch_size

    def window(self, running: int) -> Window:
        """The least and most sequences that may join ``running`` ones in the next step."""
        return 1, self._size - running

    def joined(self) -> None:
        """Note that a sequence was admitted."""

    def decoded(self) -> None:
        """Note that a step has scheduled its decodes."""


class InflightBatching(BatchingPolicy):
    """TGI without chunking: a running batch is interrupted only for enough waiting sequences.

    At least ``floor(running * waiting_served_ratio)`` must fit at once, unless
    ``max_waiting_tokens`` decode steps have passed since the latest admission
    (text-generation-inference, backends/v3/src/backend.rs).
    """

    mixes, strict, gathers = False, True, False

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._ratio = config.waiting_served_ratio
        self._patience = config.max_waiting_tokens
        self._waited = 1

    def window(self, running: int) -> Window:
        impatient = self._waited >= self._patience
        self.join_reason = "wait_exceeded" if impatient else "backpressure"
        fewest = 1 if not running or impatient else max(1, int(running * self._ratio))
        return fewest, self._size - running

    def joined(self) -> None:
        self._waited = 1

    def decoded(self) -> None:
        self._waited += 1


class StaticBatching(BatchingPolicy):
    """A new batch only after the previous one has finished."""

    mixes, strict, gathers = False, False, True
    join_reason = ""

    def window(self, running: int) -> Window:
        return 1, 0 if running else self._size


POLICIES: dict[Batching, type[BatchingPolicy]] = {
    Batching.FUSED: BatchingPolicy,
    Batching.INFLIGHT: InflightBatching,
    Batching.STATIC: StaticBatching,
}
