"""When waiting sequences may join: one small rule per :class:`~tgi_cli.engine.config.Batching`.

A rule is asked before every step for its *window*: at least and at most how many may join now.
"""

from __future__ import annotations

from typing import Protocol

from tgi_cli.engine.config import Batching, SchedulerConfig

Window = tuple[int, int]


class BatchingPolicy(Protocol):
    """Attributes:

    mixes: prefills share a step with decodes.
    strict: prompts run whole, and one that does not fit lets nobody pass.
    gathers: a batch is gathered at once, though its prefill may take several steps.
    reason: why those that join a running batch now may do so, in TGI's words.
    """

    mixes: bool
    strict: bool
    gathers: bool
    reason: str

    def window(self, running: int) -> Window:
        """How few and how many sequences may join ``running`` ones in the next step."""
        ...

    def joined(self) -> None:
        """A step admitted someone."""
        ...

    def decoded(self) -> None:
        """A step only decoded."""
        ...


class Fused:
    """Anyone at any step."""

    mixes, strict, gathers = True, False, False
    reason = "chunking"

    def __init__(self, limits: SchedulerConfig) -> None:
        self._size = limits.max_batch_size

    def window(self, running: int) -> Window:
        return 1, self._size - running

    def joined(self) -> None: ...

    def decoded(self) -> None: ...


class Inflight:
    """TGI without chunking: a running batch is interrupted only for enough newcomers.

    At least ``floor(running * waiting_served_ratio)`` must fit at once, unless
    ``max_waiting_tokens`` decode steps have passed since anyone joined
    (text-generation-inference, backends/v3/src/backend.rs).
    """

    mixes, strict, gathers = False, True, False

    def __init__(self, limits: SchedulerConfig) -> None:
        self._size = limits.max_batch_size
        self._ratio = limits.waiting_served_ratio
        self._patience = limits.max_waiting_tokens
        self._waited = 1
        self.reason = ""

    def window(self, running: int) -> Window:
        impatient = self._waited >= self._patience
        self.reason = "wait_exceeded" if impatient else "backpressure"
        fewest = 1 if not running or impatient else max(1, int(running * self._ratio))
        return fewest, self._size - running

    def joined(self) -> None:
        self._waited = 1

    def decoded(self) -> None:
        self._waited += 1


class Static:
    """A new batch only after the last one has run to its end."""

    mixes, strict, gathers = False, False, True
    reason = ""

    def __init__(self, limits: SchedulerConfig) -> None:
        self._size = limits.max_batch_size

    def window(self, running: int) -> Window:
        return 1, 0 if running else self._size

    def joined(self) -> None: ...

    def decoded(self) -> None: ...


def batching_policy_of(limits: SchedulerConfig) -> BatchingPolicy:
    """The rule that the limits name."""
    rules: dict[Batching, type[Fused] | type[Inflight] | type[Static]]
    rules = {Batching.FUSED: Fused, Batching.INFLIGHT: Inflight, Batching.STATIC: Static}
    return rules[limits.batching](limits)
