"""Carries out what the scheduler decides: starts and stops models, and lets requests run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from tgi_cli.config.model_names import BASE_NAME
from tgi_cli.errors import ShardError
from tgi_cli.multi_model.config import ModelSpec
from tgi_cli.multi_model.front_metrics import FrontMetrics
from tgi_cli.multi_model.model_process import ModelProcess
from tgi_cli.multi_model.model_scheduler import (
    LoadState,
    ModelScheduler,
    QueueFullError,
    ScheduledModel,
    SwitchPolicy,
    Ticket,
)
from tgi_cli.process.units import format_memory
from tgi_cli.router.bounds import NAME_CHARACTERS
from tgi_cli.router.http import errors

log = logging.getLogger(__name__)

_MEASURE_SECONDS = 5.0
"""Interval of measuring the memory of loaded models."""
_CALL_SECONDS = 10.0
_DRAIN_RETRY_SECONDS = 5
"""Retry-After while this server shuts down."""

StartModel = Callable[[ModelSpec], ModelProcess]


class ModelManager:
    """The models and their processes. Use from the event loop only.

    Args:
        specs: The models; the first is the default.
        policy: When they are loaded and unloaded.
        start: Starts the processes of a model.

    Attributes:
        specs: The models by name.
        scheduler: Their states.
        cards: What each model's own server lists, by name, from its last load on.
        failures: Why a model's last load failed, by name.
    """

    def __init__(self, specs: Sequence[ModelSpec], policy: SwitchPolicy, start: StartModel) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.metrics = FrontMetrics(list(self.specs))
        self.scheduler = ModelScheduler(
            [
                ScheduledModel(name=spec.name, memory=spec.memory, idle_seconds=spec.idle_seconds)
                for spec in specs
            ],
            policy,
        )
        self.cards: dict[str, list[dict[str, Any]]] = {}
        self.failures: dict[str, str] = {}
        self._default = specs[0]
        self._start = start
        self._processes: dict[str, ModelProcess] = {}
        self._waiting: dict[int, asyncio.Future[None]] = {}
        """By the numbers of tickets."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._names = {name: spec.name for spec in reversed(specs) for name in spec.names}
        self._spawn(self._measure())

    # ------------------------------------------------------------------ requests

    def resolve(self, name: str | None) -> str:
        """The model that a request names, or the default for none. Raises ApiError, 404."""
        if not name or name == BASE_NAME:
            return self._default.name
        found = self._names.get(name)
        if found is None:
            for model, cards in self.cards.items():  # adapters
                if any(card.get("id") == name for card in cards):
                    return model
            known, shown = ", ".join(self.specs), name[:NAME_CHARACTERS]
            raise errors.no_model(f"The model `{shown}` does not exist; models: {known}")
        return found

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[ModelProcess]:
        """Wait until the model is loaded, and keep it until the end of the block.

        Raises:
            ApiError: 503 if the request cannot wait, or the model cannot be loaded.
        """
        arrived = time.monotonic()
        ticket = self._arrive(name)
        admitted = self._waiting[ticket.number] = asyncio.get_running_loop().create_future()
        try:
            self._plan()
            await admitted
        except BaseException:
            if not admitted.done() or admitted.cancelled():
                self.scheduler.cancel(ticket)
            elif admitted.exception() is None:  # the client went as its turn came
                self._leave(name)
            raise
        finally:
            self._waiting.pop(ticket.number, None)
        self.metrics.waits.observe(time.monotonic() - arrived)
        try:
            process = self._processes.get(name)
            if process is None:
                raise errors.engine_gone(f"the model {name} is gone")
            yield process
        finally:
            self._leave(name)

    def load(self, name: str) -> None:
        """Have a model loaded, as if a request had come for it. Raises ApiError.

        Nothing is queued for a model that is loaded, or that such a call has queued already: no
        client waits for its end, so that any number of them could fill the queue.
        """
        loaded = self.scheduler.models[name].state is LoadState.LOADED
        if not loaded and not self.scheduler.load_wanted(name):
            self._arrive(name, runs=False)
            self._plan()

    def unload(self, name: str) -> None:
        """Have a model unloaded once its requests are done, or their time is up."""
        if self.scheduler.models[name].state.takes_memory:
            self.scheduler.want_unload(name)
            self._plan()

    def _arrive(self, name: str, *, runs: bool = True) -> Ticket:
        if self._closed:
            raise errors.draining(_DRAIN_RETRY_SECONDS)
        try:
            return self.scheduler.arrive(name, time.monotonic(), runs=runs)
        except QueueFullError as error:
            self.metrics.refusals.add()
            raise errors.model_busy(str(error), math.ceil(error.retry_after)) from None

    def _leave(self, name: str) -> None:
        self.scheduler.leave(name, time.monotonic())
        self._plan()

    # ------------------------------------------------------------------ models

    def loaded(self) -> Mapping[str, ModelProcess]:
        """The processes of the models that serve."""
        states = {name: model.state for name, model in self.scheduler.models.items()}
        serving = (LoadState.LOADED, LoadState.DRAINING)
        return {name: one for name, one in self._processes.items() if states[name] in serving}

    async def refresh_cards(self, name: str) -> None:
        """List again what a loaded model's server serves: the model and its adapters."""
        process = self._processes.get(name)
        if process is None:
            return
        with contextlib.suppress(httpx.HTTPError, msgspec.DecodeError):
            answer = await process.client.get(
                "/v1/models", headers=process.own_headers, timeout=_CALL_SECONDS
            )
            if answer.status_code == httpx.codes.OK:
                self.cards[name] = msgspec.json.decode(answer.content)["data"]

    async def until_loaded(self, name: str) -> None:
        """Load a model and wait until it serves. Raises ApiError."""
        async with self.using(name):
            return

    async def close(self) -> None:
        """Stop all models; requests that wait for one end with an error."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for admitted in self._waiting.values():
            if not admitted.done():
                admitted.set_exception(errors.draining(_DRAIN_RETRY_SECONDS))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(process.stop() for process in self._processes.values()))

    # ------------------------------------------------------------------ the plan

    def _plan(self) -> None:
        """Do what the scheduler decides now, and look again when time alone changes that."""
        if self._closed:
            return
        scheduler = self.scheduler
        now = time.monotonic()
        plan = scheduler.plan(now)
        for ticket in plan.admitted:
            admitted = self._waiting.get(ticket.number)
            if admitted is None or admitted.done():
                if ticket.runs:  # the client has gone
                    scheduler.leave(ticket.model, time.monotonic())
            else:
                admitted.set_result(None)
        for name in plan.unload:
            self._spawn(self._unload(name))
        for name in plan.load:
            self._spawn(self._load(name))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        seconds = scheduler.next_time(now) - now
        if seconds < math.inf:
            # Timers of event loops may fire a little early.
            delay = max(0.0, seconds) + 0.01
            self._timer = asyncio.get_running_loop().call_later(delay, self._plan)

    async def _load(self, name: str) -> None:
        log.info("loading %s", name)
        try:
            process = self._processes[name] = self._start(self.specs[name])
            seconds = await process.ready()
        except (ShardError, OSError) as error:
            self._fail(name, str(getattr(error, "cause", error)))
            return
        await self.refresh_cards(name)
        memory = await process.memory()
        self.failures.pop(name, None)
        self.metrics.count_load(name, "success")
        self.scheduler.on_loaded(name, memory, seconds, time.monotonic())
        log.info("%s is loaded, in %.1f s, with %s", name, seconds, format_memory(memory))
        self._spawn(self._watch(name, process))
        self._plan()

    def _fail(self, name: str, cause: str) -> None:
        """A model could not be loaded: its requests end with the cause."""
        log.error("%s cannot be loaded: %s", name, cause)
        self.failures[name] = cause
        self.metrics.count_load(name, "failure")
        self._forget(name, f"the model {name} cannot be loaded: {cause}")

    def _forget(self, name: str, cause: str) -> None:
        process = self._processes.pop(name, None)
        for ticket in self.scheduler.on_load_failed(name):
            admitted = self._waiting.get(ticket.number)
            if admitted is not None and not admitted.done():
                admitted.set_exception(errors.engine_gone(cause))
        if process is not None:
            self._spawn(process.stop())  # closes its connections
        self._plan()

    async def _watch(self, name: str, process: ModelProcess) -> None:
        """Notice that a model's processes have ended unexpectedly."""
        await process.wait()
        if self._processes.get(name) is process and not self._closed:
            state = self.scheduler.models[name].state
            if state is not LoadState.UNLOADING:
                cause = process.failure().cause
                log.error("%s is gone: %s", name, cause)
                self._forget(name, f"the model {name} is gone: {cause}")

    async def _unload(self, name: str) -> None:
        log.info("unloading %s", name)
        process = self._processes[name]
        await self._remember(name, process)
        await process.stop()
        self._processes.pop(name, None)
        self.metrics.unloads[name] += 1
        self.scheduler.on_unloaded(name)
        log.info("%s is unloaded", name)
        self._plan()

    async def _measure(self) -> None:
        """Measure the memory of loaded models at intervals, as caches fill up."""
        while True:
            await asyncio.sleep(_MEASURE_SECONDS)
            for name, process in list(self.loaded().items()):
                await self._remember(name, process)
            if self.scheduler.memory_taken > self.scheduler.policy.budget:
                self._plan()

    async def _remember(self, name: str, process: ModelProcess) -> None:
        memory = await process.memory()
        if memory:
            self.scheduler.on_memory(name, memory)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the models failed", exc_info=error)
