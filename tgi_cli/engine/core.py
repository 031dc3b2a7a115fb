"""The core loop: requests from the inbox, steps on the worker, outputs to the outbox.

After vLLM's RFC 23233: launching and sampling are separate calls that do not wait, and with
``depth`` 1 the next step is scheduled and launched before the host has the tokens of this one.
A CPU runs the same loop at depth 0. Nothing calls back and nothing mutable is shared: the
thread that runs :meth:`EngineCore.run` owns the scheduler and the worker.

Blocks and rows that a result frees while a later step still uses them need no fence: whoever
gets them next writes in a step that the device runs after that one, in order of the launches.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.external_steps import ExternalStepScheduler
from tgi_cli.engine.messages import (
    Advance,
    Cancel,
    Drop,
    Fail,
    Finished,
    GenerationRequest,
    LoadAdapter,
    Shutdown,
    StepOutputs,
    UnloadAdapter,
)
from tgi_cli.engine.metrics import EngineMetrics, StepStats, StepTimer
from tgi_cli.engine.scheduler import Scheduler
from tgi_cli.engine.step import GrammarCompiler, PendingResult, Step, Worker
from tgi_cli.errors import ShardError

log = logging.getLogger(__name__)

Inbound = (
    GenerationRequest | Cancel | LoadAdapter | UnloadAdapter | Advance | Drop | Fail | Shutdown
)

MAX_CONSECUTIVE_FAILURES = 3
"""Failing steps in a row after which the device is taken to be lost."""

READING_SECONDS = 0.005
"""Between two looks at what other threads read or compile, while there is nothing else to do."""


class EngineCore:
    """Runs one scheduler over one worker.

    Args:
        worker: runs the steps.
        limits: what a step and a request may not exceed.
        depth: steps launched beyond the one whose result is awaited (0 or 1).
        grammars: compiles grammars, or None to refuse requests that have one.
        on_step: called for each step as it is launched, on the loop's thread: keep it quick.

    Attributes:
        inbox: put messages here, from any thread.
        outbox: yields a StepOutputs per step with news, and None after the loop has ended.
        steps: how many steps have run.
    """

    def __init__(
        self,
        worker: Worker,
        limits: SchedulerConfig,
        depth: int = 0,
        grammars: GrammarCompiler | None = None,
        on_step: Callable[[StepStats], None] | None = None,
    ) -> None:
        self.inbox: SimpleQueue[Inbound] = SimpleQueue()
        self.outbox: SimpleQueue[StepOutputs | None] = SimpleQueue()
        self.steps = 0
        self._looks = 0
        self._worker = worker
        self._scheduler = Scheduler(limits, worker if limits.max_loras else None, grammars)
        self._stepper = ExternalStepScheduler(self._scheduler, grammars)
        self._depth = depth
        self._on_step = on_step
        self._metrics = EngineMetrics()
        self._timer = StepTimer(self._metrics)
        self._pending: deque[PendingResult] = deque()
        self._failures = 0
        self._stalled = False

    @property
    def progress(self) -> int:
        """Grows while a healthy engine has work, if only by waiting for what others have to do.

        Those are its steps, and its looks at the inbox while it waits for adapters to be read,
        grammars to be compiled, or room that somebody else holds. May be read from any thread.
        """
        return self.steps + self._looks

    @property
    def live_requests(self) -> int:
        """Requests that wait or run; may be read from any thread."""
        return self._scheduler.num_live + self._stepper.calls + self.inbox.qsize()

    @property
    def driven_requests(self) -> int:
        """Those whose steps somebody asks for, and not long ago; may be read from any thread."""
        return self._stepper.num_driven

    @property
    def metrics(self) -> EngineMetrics:
        """The engine's measurements up to now; may be read from any thread."""
        self._metrics.load = self._scheduler.load()
        return self._metrics

    def run(self) -> None:
        """Serve until a Shutdown arrives.

        Raises:
            RuntimeError: several steps in a row failed; every live request was ended first.
            ShardError: the worker is lost; every live request was ended with that cause.
        """
        cause = "the engine has ended"
        try:
            while self._drain_inbox():
                self._advance()
                if self._stepper.calls:
                    self._drive()
        except ShardError as error:
            cause = error.cause
            self._emit(self._scheduler.fail_all(cause))
            raise
        finally:
            self._emit(self._scheduler.cancel_all())
            self._stepper.end(cause)
            self.outbox.put(None)

    def _drain_inbox(self) -> bool:
        """Take in all messages; wait for one when there is nothing else to do."""
        news: list[Finished] = []
        running = True
        lost: Fail | None = None
        adapters = self._scheduler.adapters
        idle = not self._pending and (self._stalled or not self._scheduler.num_live)
        idle = idle and (self._stepper.deferred or not self._stepper.calls)
        patience = READING_SECONDS if idle and self._awaits_others else None
        self._looks += patience is not None
        while running:
            try:
                message = self.inbox.get(block=idle, timeout=patience)
            except Empty:
                break
            idle = False
            if isinstance(message, GenerationRequest):
                refused = self._scheduler.add(message)
                if refused is not None:
                    news.append(refused)
            elif isinstance(message, Cancel):
                ended = self._scheduler.cancel(message.request_id)
                if ended is not None:
                    news.append(ended)
            elif isinstance(message, LoadAdapter):
                adapters.load(message)
            elif isinstance(message, UnloadAdapter):
                adapters.unload(message.adapter_id)
            elif isinstance(message, Advance):
                self._stepper.advance(message)
            elif isinstance(message, Drop):
                self._stepper.drop(message.request_ids)
            elif isinstance(message, Fail):
                lost, running = message, False
            else:
                running = False
        news.extend(self._scheduler.expire())
        failed = adapters.collect() if adapters.reading else []
        news.extend(self._scheduler.fail_adapters(failed))
        news.extend(self._scheduler.collect_grammars())
        if self._stepper.num_live:
            self._stepper.collect(failed)
        self._emit(news)
        if lost is not None:
            raise ShardError(lost.cause, lost.remedy)
        return running

    @property
    def _awaits_others(self) -> bool:
        """Whether adapters are being read, or grammars compiled; or somebody else has the room."""
        scheduler, stepper = self._scheduler, self._stepper
        threads = scheduler.adapters.reading or scheduler.grammars.compiling or stepper.calls > 0
        return threads or (self._stalled and stepper.num_live > 0)

    def _advance(self) -> None:
        """Launch one step if there is one; take in the oldest result that is due."""
        began = time.perf_counter()
        step = self._scheduler.schedule()
        if step is not None:
            self._timer.launch(step, began)
            try:
                handle = self._worker.launch(step)
                masks = self._masks() if self._scheduler.grammars.needs_mask else None
                self._pending.append(self._worker.sample(handle, masks))
            except ShardError:  # nothing that was launched will arrive
                raise
            except Exception as error:  # a step's failure, whatever it is, ends its requests only
                while self._pending:
                    self._collect()
                self._fail(error)
            self._record(step)
        self._scheduler.adapters.read_wanted()
        if self._stepper.running and self._scheduler.waiting:
            self._stepper.give_way()
        self._stalled = step is None and not self._pending and self._scheduler.num_live > 0
        if self._stalled and not self._awaits_others:
            raise RuntimeError("requests wait, and none of them can be scheduled")
        while self._pending and (step is None or len(self._pending) > self._depth):
            self._collect()

    def _drive(self) -> None:
        """One of the steps that somebody asks for, from its launch to its result."""
        while self._pending:
            self._collect()
        self._stalled = False  # there may be room where there was none
        began = time.perf_counter()
        stepper = self._stepper
        step = stepper.schedule()
        if step is None:
            self._scheduler.adapters.read_wanted()
            return
        self._timer.launch(step, began)
        try:
            handle = self._worker.launch(step)
            masks = stepper.grammars.masks() if stepper.grammars.needs_mask else None
            result = self._worker.sample(handle, masks).wait()
        except ShardError:
            raise
        except Exception as error:  # as below: it ends the sequences of this call only
            self._fail(error, stepper)
            return
        self._arrive()
        stepper.update(result)
        self._timer.update()
        self._timer.end()
        self._record(step, stepper)

    def _masks(self) -> tuple[list[int], Any] | None:
        """What grammars allow in the step just launched, computed while the device works on it.

        A matcher must have seen the tokens before the one that it has a say in: those that
        steps in flight choose are waited for first.
        """
        while self._pending:
            self._collect()
        return self._scheduler.grammars.masks()

    def _collect(self) -> None:
        """Wait for the oldest result and apply it."""
        pending = self._pending.popleft()
        try:
            result = pending.wait()
        except ShardError:
            raise
        except Exception as error:  # as above: asynchronous failures surface here
            self._fail(error)
            return
        self._arrive()
        outputs = self._scheduler.update(result)
        self._timer.update()
        if outputs:
            self.outbox.put(outputs)
        self._timer.end()

    def _arrive(self) -> None:
        """The oldest result is there."""
        self._failures = 0
        self.steps += 1
        self._timer.arrive()

    def _record(self, step: Step, scheduler: Scheduler | None = None) -> None:
        """Record a step that was launched, while the device works."""
        scheduler = scheduler or self._scheduler
        self._metrics.step_launched(step, scheduler.join_reason(step), self._scheduler.oldest_ns)
        debug = log.isEnabledFor(logging.DEBUG)
        if self._on_step is None and not debug:
            return
        stats = self._scheduler.stats(step)
        if self._on_step is not None:
            self._on_step(stats)
        if debug:
            log.debug("%s", stats.to_json())

    def _fail(self, error: Exception, scheduler: Scheduler | None = None) -> None:
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        log.error("a step failed: %s", cause, exc_info=error)
        self.steps += 1
        self._failures += 1
        self._timer.fail()
        self.outbox.put((scheduler or self._scheduler).fail(cause))
        if self._failures >= MAX_CONSECUTIVE_FAILURES:
            raise RuntimeError(f"{self._failures} steps failed in a row") from error

    def _emit(self, finished: list[Finished]) -> None:
        if finished or self._scheduler.adapters.answers:
            outputs = StepOutputs(finished=finished)
            self._scheduler.describe(outputs)
            self.outbox.put(outputs)
