"""The core loop: requests from the inbox, steps on the worker, outputs to the outbox.

After vLLM's RFC 23233: launching and sampling are separate calls that do not wait, and with
``depth`` 1 the next step is scheduled and launched before the host has the tokens of this one.
A CPU runs the same loop at depth 0. There are no callbacks and no shared mutable state: the
thread that runs :meth:`EngineCore.run` owns the schedulers and the worker.

Blocks and rows that a result frees while a later step still uses them need no fence: their next
owner writes in a step that the device runs after that one, in order of the launches.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

from tgi_cli.engine.block_store import BlockStore
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.external_steps import ExternalStepScheduler
from tgi_cli.engine.messages import (
    Advance,
    Cancel,
    Drop,
    Fail,
    Finished,
    FinishReason,
    GenerationRequest,
    LoadAdapter,
    Shutdown,
    StepOutputs,
    UnloadAdapter,
)
from tgi_cli.engine.metrics import EngineMetrics, StageTimer, StepStats
from tgi_cli.engine.scheduler import Scheduler
from tgi_cli.engine.speculator import Speculator
from tgi_cli.engine.step import GrammarCompiler, PendingResult, Step, Worker
from tgi_cli.errors import ShardError

log = logging.getLogger(__name__)

Inbound = (
    GenerationRequest | Cancel | LoadAdapter | UnloadAdapter | Advance | Drop | Fail | Shutdown
)

MAX_CONSECUTIVE_FAILURES = 3
"""Failed steps in a row after which the device is considered lost."""

POLL_SECONDS = 0.005
"""Interval at which an otherwise idle loop checks what other threads read or compile."""

SETTLED_STEPS = 16
"""Steps that only decode after which no new prompts are expected soon."""

IDLE_SECONDS = 1.0
"""Time without requests after which :attr:`EngineCore` calls ``on_idle``."""


class EngineCore:
    """Runs the scheduler, and externally driven steps, over one worker.

    Args:
        worker: runs the steps.
        config: limits of a step and of a request.
        depth: steps launched beyond the one whose result is awaited (0 or 1; more only if the model
            is in several pipeline stages).
        compiler: compiles grammars, or None to refuse requests that have one.
        speculator: proposes draft tokens; None without speculative decoding.
        on_step: called for each step as it is launched, on the loop's thread: must be fast.
        external_drafts: whether drafts are proposed for externally driven sequences, too, whose
            steps may then give several tokens.
        on_idle: called on the loop's thread once nothing has been live for :data:`IDLE_SECONDS`,
            and :data:`SETTLED_STEPS` steps after the last one with prompts: a good time to return
            memory that these have freed.
        blocks: keeps copies of KV blocks, at ``depth`` 0; None for none.

    Attributes:
        inbox: put messages here, from any thread.
        outbox: yields a StepOutputs per step with outputs, and None after the loop has ended.
        steps: how many steps have run.
    """

    def __init__(
        self,
        worker: Worker,
        config: SchedulerConfig,
        depth: int = 0,
        compiler: GrammarCompiler | None = None,
        speculator: Speculator | None = None,
        on_step: Callable[[StepStats], None] | None = None,
        external_drafts: bool = False,
        on_idle: Callable[[], None] | None = None,
        blocks: BlockStore | None = None,
    ) -> None:
        self.inbox: SimpleQueue[Inbound] = SimpleQueue()
        self.outbox: SimpleQueue[StepOutputs | None] = SimpleQueue()
        self.steps = 0
        self._polls = 0
        self._worker = worker
        store = worker if config.max_loras else None
        self._blocks = blocks
        self._scheduler = Scheduler(config, store, compiler, speculator, blocks)
        self._batch = self._scheduler.batch
        self._adapters = self._batch.adapters
        drafter = speculator if external_drafts else None
        self._external = ExternalStepScheduler(self._batch, compiler, drafter)
        self._depth = depth
        self._in_stages = config.pipeline_parallel_size > 1
        self._on_step = on_step
        self._on_idle = on_idle
        self._has_rested = on_idle is None
        self._steps_since_prompt = 0
        self._metrics = EngineMetrics()
        if blocks is not None:
            self._metrics.store_counted(blocks.counts)
        self._timer = StageTimer(self._metrics)
        self._pending: deque[tuple[Step, PendingResult]] = deque()
        self._finished: list[Finished] = []
        self._failures = 0
        self._stalled = False
        self._ending: Fail | Shutdown | None = None

    @property
    def progress(self) -> int:
        """A number that grows while a healthy engine has work, even if it only waits.

        Counts its steps, and its checks of the inbox while it waits for adapters to be read,
        grammars to be compiled, or blocks of external sequences. May be read from any thread.
        """
        return self.steps + self._polls

    @property
    def live_requests(self) -> int:
        """Requests that wait or run; may be read from any thread."""
        return len(self._batch.live) + self._external.num_calls + self.inbox.qsize()

    @property
    def driven_requests(self) -> int:
        """Externally driven sequences that are not idle; may be read from any thread."""
        return self._external.num_driven

    @property
    def metrics(self) -> EngineMetrics:
        """The engine's measurements up to now; may be read from any thread."""
        load, blocks = self._scheduler.load(), self._blocks
        if blocks is not None:
            load = replace(load, stored_bytes=blocks.num_bytes)
            self._metrics.store_counted(blocks.counts)
        self._metrics.load = load
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
                if self._external.num_calls:
                    self._advance_external()
        except ShardError as error:
            cause = error.cause
            self._emit(self._batch.finish_all(FinishReason.ERROR, cause))
            raise
        finally:
            self._emit(self._batch.finish_all(FinishReason.CANCELLED))
            self._external.end(cause)
            self.outbox.put(None)

    # ------------------------------------------------------------------ the inbox

    def _drain_inbox(self) -> bool:
        """Handle all messages, after waiting for one if idle; False once the loop is to end."""
        idle = self._is_idle()
        waits = idle and self._awaits_others()
        timeout = POLL_SECONDS if waits else None if self._has_rested else IDLE_SECONDS
        self._polls += waits
        while self._ending is None:
            try:
                message = self.inbox.get(block=idle, timeout=timeout)
            except Empty:
                if idle and not waits:
                    self._rest()
                break
            idle = False
            self._HANDLERS[type(message)](self, message)
        self._collect_from_threads()
        finished, self._finished = self._finished, []
        self._emit(finished)
        if isinstance(self._ending, Fail):
            raise ShardError(self._ending.cause, self._ending.remedy)
        return self._ending is None

    def _rest(self) -> None:
        """Call ``on_idle``: nothing has been live for :data:`IDLE_SECONDS`."""
        self._has_rested = True
        if self._on_idle is not None:
            self._on_idle()

    def _is_idle(self) -> bool:
        """Whether there is nothing to do before a message arrives or another thread is done."""
        if self._pending or (self._batch.live and not self._stalled):
            return False
        return not self._external.num_calls or self._external.deferred

    def _awaits_others(self) -> bool:
        """Whether threads read or compile something, or external sequences hold blocks."""
        threads = self._adapters.reading or self._batch.grammars.compiling
        threads = threads or (self._blocks is not None and self._blocks.loading)
        external = self._external
        return threads or external.num_calls > 0 or (self._stalled and bool(external.batch.live))

    def _add(self, request: GenerationRequest) -> None:
        refused = self._scheduler.add(request)
        if refused is not None:
            self._finished.append(refused)

    def _cancel(self, message: Cancel) -> None:
        ended = self._batch.cancel(message.request_id)
        if ended is not None:
            self._finished.append(ended)

    def _end(self, message: Fail | Shutdown) -> None:
        self._ending = message

    _HANDLERS: ClassVar[dict[type, Callable[[EngineCore, Any], None]]] = {
        GenerationRequest: _add,
        Cancel: _cancel,
        LoadAdapter: lambda self, message: self._adapters.load(message),
        UnloadAdapter: lambda self, message: self._adapters.unload(message.adapter_id),
        Advance: lambda self, message: self._external.advance(message),
        Drop: lambda self, message: self._external.drop(message.request_ids),
        Fail: _end,
        Shutdown: _end,
    }

    def _collect_from_threads(self) -> None:
        """Take the adapters and grammars that are done, and end the requests that are overdue."""
        self._finished += self._scheduler.expire()
        failed = self._adapters.collect() if self._adapters.reading else []
        self._finished += self._batch.fail_adapters(failed)
        self._finished += self._batch.collect_grammars()
        self._finished += self._batch.end_failed_images()
        if self._external.batch.live:
            self._external.collect(failed)

    # ------------------------------------------------------------------ steps

    def _advance(self) -> None:
        """Launch one step if there is one; apply the oldest result that is due."""
        if self._pending and self._scheduler.may_draft:
            while self._pending:  # drafts follow the tokens that the host knows
                self._collect()
        began = time.perf_counter()
        step = self._scheduler.schedule()
        if step is not None:
            self._timer.launch(step, began)
            try:
                handle = self._worker.launch(step)
                masks = self._masks() if self._batch.grammars.needs_mask else None
                self._pending.append((step, self._worker.sample(handle, masks)))
            except ShardError:  # no launched step will return a result
                raise
            except Exception as error:  # any failure of a step ends its requests only
                while self._pending:
                    self._collect()
                self._fail(error, self._scheduler)
            self._record(step, self._scheduler.join_reason(step))
        self._adapters.read_wanted()
        if self._external.batch.running and self._batch.waiting:
            self._external.park_idle()
        self._stalled = step is None and not self._pending and bool(self._batch.live)
        if self._stalled and not self._awaits_others():
            raise RuntimeError("requests wait, and none of them can be scheduled")
        while self._pending and (step is None or len(self._pending) > self._depth):
            self._collect()
            if self._in_stages:  # its sequences continue while other steps are in flight
                break

    def _advance_external(self) -> None:
        """One externally driven step, from its launch to its result."""
        while self._pending:
            self._collect()
        self._stalled = False  # blocks may have become free
        began = time.perf_counter()
        external = self._external
        step = external.schedule()
        if step is None:
            self._adapters.read_wanted()
            return
        self._timer.launch(step, began)
        grammars = external.batch.grammars
        try:
            handle = self._worker.launch(step)
            masks = grammars.masks() if grammars.needs_mask else None
            result = self._worker.sample(handle, masks).wait()
        except ShardError:
            raise
        except Exception as error:  # as above: it ends the sequences of this call only
            self._fail(error, external)
            return
        self._arrive()
        self._metrics.step_updated(external.update(result))
        self._timer.update()
        external.batch.timed(step, result, self._timer.end())
        self._record(step)

    def _masks(self) -> tuple[list[int], Any] | None:
        """The masks of grammars for the step just launched, computed while the device works on it.

        A matcher must have accepted all tokens before the one that it constrains: the results of
        steps in flight are awaited first. With pipeline stages, these are of other sequences.
        """
        while self._pending and not self._in_stages:
            self._collect()
        return self._batch.grammars.masks()

    def _collect(self) -> None:
        """Wait for the oldest result and apply it."""
        step, pending = self._pending.popleft()
        try:
            result = pending.wait()
        except ShardError:
            raise
        except Exception as error:  # as above: asynchronous failures surface here
            self._fail(error, self._scheduler)
            return
        self._arrive()
        outputs = self._scheduler.update(result)
        self._metrics.step_updated(outputs)
        self._timer.update()
        if outputs:
            self.outbox.put(outputs)
        seconds = self._timer.end()
        self._batch.timed(step, result, seconds)
        if self._blocks is not None and step.num_tokens == step.num_prefill_tokens > 0:
            self._blocks.timed(step.num_prefill_tokens, seconds)
        self._steps_since_prompt = 0 if step.num_prefill_tokens else self._steps_since_prompt + 1
        if self._steps_since_prompt == SETTLED_STEPS and self._on_idle is not None:
            self._on_idle()

    def _arrive(self) -> None:
        """Record that the oldest result has arrived."""
        self._failures = 0
        self._has_rested = self._on_idle is None
        self.steps += 1
        self._timer.arrive()

    def _record(self, step: Step, join_reason: str = "") -> None:
        """Record a step that was launched, while the device works."""
        self._metrics.step_launched(step, join_reason, self._scheduler.oldest_ns)
        debug = log.isEnabledFor(logging.DEBUG)
        if self._on_step is None and not debug:
            return
        stats = self._scheduler.stats(step)
        if self._on_step is not None:
            self._on_step(stats)
        if debug:
            log.debug("%s", json.dumps(stats))

    def _fail(self, error: Exception, scheduler: Scheduler | ExternalStepScheduler) -> None:
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        log.error("a step failed: %s", cause, exc_info=error)
        self.steps += 1
        self._failures += 1
        self._timer.fail()
        self.outbox.put(scheduler.fail(cause))
        if self._failures >= MAX_CONSECUTIVE_FAILURES:
            raise RuntimeError(f"{self._failures} steps failed in a row") from error

    def _emit(self, finished: list[Finished]) -> None:
        if finished or self._adapters.answers:
            self.outbox.put(self._scheduler.complete(StepOutputs(finished=finished)))
