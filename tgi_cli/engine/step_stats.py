"""What one step was, in the fields of TensorRT-LLM's batch manager.

https://nvidia.github.io/TensorRT-LLM/legacy/advanced/batch-manager.html#statistics

Made at every step, so tuples: frozen dataclasses of so many fields take three times as long.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple


class StepStatistics(NamedTuple):
    """One step of the engine. Counts are requests, blocks or tokens, as named.

    Attributes:
        timestamp: seconds since the epoch.
        iteration: steps so far.
        active_requests: that wait or run.
        max_requests: that can run at once.
        max_blocks, free_blocks, used_blocks: of the KV cache; free ones include those whose
            content is kept for reuse.
        cached_blocks: blocks, used or free, whose content can be found by a prefix.
        tokens_per_block: of the KV cache.
        scheduled_requests: in this step, context_requests + generation_requests.
        context_requests: whose prompt (or what preemption lost, or a grammar gave) it computed.
        generation_requests: that it gave one more token.
        context_tokens: prompt tokens that it computed, and others that no step chose.
        reused_tokens: prompt tokens that were found in the prefix cache, since the start.
        prompt_tokens: prompt tokens of all requests that started, since the start.
        preemptions: since the start.
        new_requests: that got a place in the batch with it.
        joined: why they joined requests that run already (TGI's words: ``chunking``,
            ``backpressure``, ``wait_exceeded``); empty: they did not.
        oldest_ns: when the one that waits longest came, in ``time.monotonic_ns()``; 0: none waits.
    """

    timestamp: float
    iteration: int
    active_requests: int
    max_requests: int
    max_blocks: int
    free_blocks: int
    used_blocks: int
    cached_blocks: int
    tokens_per_block: int
    scheduled_requests: int
    context_requests: int
    generation_requests: int
    context_tokens: int
    reused_tokens: int
    prompt_tokens: int
    preemptions: int
    new_requests: int = 0
    joined: str = ""
    oldest_ns: int = 0

    def to_json(self) -> str:
        """One object under the batch manager's own names, and ours for what it lacks."""
        clock = time.strftime("%m-%d-%Y %H:%M:%S", time.localtime(self.timestamp))
        return json.dumps(
            {
                "Timestamp": clock,
                "Iteration Counter": self.iteration,
                "Active Request Count": self.active_requests,
                "Max Request Count": self.max_requests,
                "Max KV cache blocks": self.max_blocks,
                "Free KV cache blocks": self.free_blocks,
                "Used KV cache blocks": self.used_blocks,
                "Tokens per KV cache block": self.tokens_per_block,
                "Scheduled Requests": self.scheduled_requests,
                "Context Requests": self.context_requests,
                "Generation Requests": self.generation_requests,
                "Total Context Tokens": self.context_tokens,
                "MicroBatch ID": 0,
                "Cached KV cache blocks": self.cached_blocks,
                "Reused prompt tokens": self.reused_tokens,
                "Total prompt tokens": self.prompt_tokens,
                "Preemptions": self.preemptions,
            }
        )


class StepTimes(NamedTuple):
    """What one step took of the engine's time, in seconds.

    Attributes:
        prefill: it computed prompts, perhaps beside decodes.
        joined: it let somebody into the batch.
        failed: it ended with an error.
        schedule: choosing what it computes.
        forward: the worker's, from launch to result, less what it still worked on the step before.
        update: taking in its tokens.
        send: handing them over.
    """

    prefill: bool
    joined: bool
    failed: bool
    schedule: float
    forward: float
    update: float
    send: float

    @property
    def total(self) -> float:
        """All of its own time."""
        return self.schedule + self.forward + self.update + self.send


class StepClock:
    """Follows steps through the core loop, in the order of their launches.

    Args:
        tell: gets each step's times as it ends, on the loop's thread; None: nobody asks.
    """

    def __init__(self, tell: Callable[[StepTimes], None] | None) -> None:
        self._tell = tell
        self._launched: deque[tuple[bool, bool, float, float]] = deque()
        self._last = 0.0
        self._arrived = 0.0
        self._updated = 0.0

    def launch(self, prefill: bool, joined: bool, began: float) -> None:
        """A step is about to be launched; choosing it began at ``began``."""
        now = time.perf_counter()
        self._launched.append((prefill, joined, now - began, now))

    def arrive(self) -> None:
        """The oldest step's result is there."""
        self._arrived = self._updated = time.perf_counter()

    def update(self) -> None:
        """It has been taken in."""
        self._updated = time.perf_counter()

    def end(self, failed: bool = False) -> None:
        """The oldest step is over."""
        prefill, joined, schedule, launched = self._launched.popleft()
        now = time.perf_counter()
        if failed:
            self._arrived = self._updated = now
        forward = self._arrived - max(launched, self._last)
        self._last = self._arrived
        if self._tell is not None:
            self._tell(
                StepTimes(
                    prefill=prefill,
                    joined=joined,
                    failed=failed,
                    schedule=schedule,
                    forward=forward,
                    update=self._updated - self._arrived,
                    send=now - self._updated,
                )
            )
