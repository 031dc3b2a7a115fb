"""An engine that sleeps: it is stopped when it is idle, and started by the next request.

The router knows which requests there are, so it decides; the launcher stops and starts the model
server (:mod:`tgi_cli.process.control_channel`). Requests that find the engine asleep wait for it,
however many they are, and it is started once for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Protocol

from tgi_cli.errors import ShardError
from tgi_cli.process.control_channel import Command, Outcome, OutcomeMessage
from tgi_cli.process.resident_memory import trim_heap
from tgi_cli.router.http import errors
from tgi_cli.router.http.admission import ConcurrencyLimiter
from tgi_cli.rpc.interface import GONE, EngineClient

logger = logging.getLogger(__name__)

_SLEEPS = "the model server is going to sleep"
_ABORT_SECONDS = 5.0
"""Longest wait for requests to end that are aborted."""
_ABORT_INTERVAL = 0.1
"""Interval at which requests that were still being prepared are aborted."""
_LOST_SECONDS = 1.0
"""Interval of checks for the idle time while the engine is gone."""


class EnginePhase(Enum):
    """Whether the engine can be used."""

    AWAKE = auto()
    """Requests run as without sleep; if it is gone, the launcher restarts it."""
    STOPPING = auto()
    """It finishes requests or is being stopped; new requests wait until it is started again."""
    ASLEEP = auto()
    WAKING = auto()


class Launcher(Protocol):
    """The part of a launcher that is used here."""

    def send(self, command: Command) -> None: ...


class LoadedAdapters(Protocol):
    """The part of :class:`tgi_cli.router.engine_restart.DynamicAdapters` that is used here."""

    async def settled(self, name: str) -> None:
        """Wait while an adapter is loaded again. Raises ApiError."""
        ...


class EngineSleep:
    """Puts the engine to sleep and wakes it. Use from the event loop only.

    Attributes:
        phase: Whether the engine can be used.
        wakes: How often it was woken.
        failed_wakes: How often that failed.
        wake_seconds: Time that the last one took; 0 before it.
    """

    def __init__(
        self, client: EngineClient, admission: ConcurrencyLimiter, adapters: LoadedAdapters
    ) -> None:
        self.phase = EnginePhase.AWAKE
        self.wakes = self.failed_wakes = 0
        self.wake_seconds = 0.0
        self._client = client
        self._admission = admission
        self._adapters = adapters
        self._launcher: Launcher | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._waking: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._outcome: asyncio.Future[None] | None = None
        """Outcome of the command that was sent last."""
        self._no_wake = ""
        """Why the engine is not to be woken any more."""
        client.on_found(self._found)

    @property
    def awake(self) -> bool:
        """Whether requests need not wait for the engine to be started."""
        return self.phase is EnginePhase.AWAKE

    def attach(self, launcher: Launcher, idle_seconds: float = 0.0) -> None:
        """Use a launcher, and sleep after ``idle_seconds`` without requests; 0 for never."""
        self._launcher = launcher
        if idle_seconds > 0:
            self._watching = asyncio.create_task(self._watch(idle_seconds), name="idle")

    def close(self) -> None:
        """Stop watching; requests that wait for the engine end with an error."""
        for task in (self._watching, self._waking, self._stopping):
            if task is not None:
                task.cancel()

    def fail_waiting(self, cause: str) -> None:
        """End the requests that wait for the engine, and wake it no more."""
        self._no_wake = cause
        if self.phase is EnginePhase.WAKING:
            self._settle(ShardError(cause))

    # ------------------------------------------------------------------ for requests

    async def ready(
        self, sequences: int, adapters: Iterable[str] = (), seconds: float | None = None
    ) -> None:
        """Wait until the engine is awake and has the adapters; wake it if it sleeps.

        Args:
            sequences: Sequences of the request; the admission has them already.
            adapters: Names of adapters that the request needs.
            seconds: Longest wait. Default: until the engine is awake, or cannot be started.

        Raises:
            ApiError: 503 with the cause if it cannot be started, 504 when the time is up.
        """
        if self.awake:
            return
        self._admission.park(sequences)
        try:
            async with asyncio.timeout(seconds):
                await self.wake()
                for name in adapters:
                    await self._adapters.settled(name)
        except TimeoutError:
            raise errors.timed_out("the model server was not awake in time") from None
        finally:
            self._admission.unpark(sequences)
        if not self._client.connected:
            raise errors.engine_gone(GONE)

    async def wake(self) -> None:
        """Start the engine unless it is awake; return when it is. Raises ApiError, 503."""
        if self.awake:
            return
        if self._waking is None:
            self._waking = asyncio.create_task(self._wake(), name="wake")
            self._waking.add_done_callback(self._end_waking)
        try:
            await asyncio.shield(self._waking)
        except ShardError as error:
            raise errors.engine_gone(
                f"the model server was asleep and could not be started: {error.cause}"
            ) from error

    # ------------------------------------------------------------------ sleep

    async def sleep(self, seconds: float, abort: Callable[[str], None]) -> None:
        """Put the engine to sleep; return when its process is gone.

        Args:
            seconds: How long requests may take to finish.
            abort: Ends the requests that have not; its argument is the cause.

        Raises:
            ApiError: 503 if there is no engine that could sleep at the moment.
        """
        if self._waking is not None:
            await self.wake()
        if self.phase is EnginePhase.ASLEEP:
            return
        if self._stopping is None or self._stopping.done():
            if self._launcher is None or not self._client.connected:
                raise errors.engine_gone(GONE)
            self.phase = EnginePhase.STOPPING
            self._stopping = asyncio.create_task(self._stop(seconds, abort), name="sleep")
        try:
            await asyncio.shield(self._stopping)
        except ShardError as error:
            raise errors.engine_gone(f"it cannot sleep: {error.cause}") from error

    async def _stop(self, seconds: float, abort: Callable[[str], None]) -> None:
        began = time.monotonic()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._admission.quiet()
            # A request that is being prepared is aborted once it has begun.
            end = time.monotonic() + _ABORT_SECONDS
            while self._admission.active and time.monotonic() < end:
                abort(_SLEEPS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_ABORT_INTERVAL):
                        await self._admission.quiet()
            self._client.expect_loss()
            await self._command(Command.SLEEP)
        except BaseException:
            self.phase = EnginePhase.AWAKE
            raise
        self.phase = EnginePhase.ASLEEP
        trim_heap()
        logger.info("the engine is asleep, after %.1f s", time.monotonic() - began)

    async def _wake(self) -> None:
        if self._stopping is not None:
            await asyncio.wait([self._stopping])
        if self.awake:  # it could not be stopped
            return
        began = time.monotonic()
        self.phase = EnginePhase.WAKING
        try:
            if self._no_wake:
                raise ShardError(self._no_wake)
            await self._command(Command.WAKE)
        except BaseException:
            self.failed_wakes += 1
            self.phase = EnginePhase.ASLEEP
            raise
        self.wakes += 1
        self.wake_seconds = time.monotonic() - began
        self.phase = EnginePhase.AWAKE
        logger.info("the engine is awake, after %.1f s", self.wake_seconds)

    def _end_waking(self, task: asyncio.Task[None]) -> None:
        self._waking = None
        if not task.cancelled():
            task.exception()  # which every request that waited has got; there may be none left

    async def _watch(self, idle_seconds: float) -> None:
        """Put the engine to sleep whenever it has been idle for long enough."""
        while True:
            await self._admission.idle()
            left = self._admission.idle_since + idle_seconds - time.monotonic()
            if left > 0:
                await asyncio.sleep(left)
            elif self._admission.in_flight or not self.awake or not self._client.connected:
                await asyncio.sleep(min(_LOST_SECONDS, idle_seconds))
            else:
                logger.info("no request for %g s", idle_seconds)
                with contextlib.suppress(errors.ApiError):
                    await self.sleep(0.0, lambda cause: None)
                await asyncio.sleep(min(_LOST_SECONDS, idle_seconds))

    # ------------------------------------------------------------------ the launcher

    async def _command(self, command: Command) -> None:
        """Send a command and wait for its outcome. Raises ShardError."""
        assert self._launcher is not None, "without one it never sleeps"
        self._outcome = asyncio.get_running_loop().create_future()
        self._launcher.send(command)
        await self._outcome

    def on_outcome(self, message: OutcomeMessage) -> None:
        """Take the launcher's answer."""
        if message.outcome is Outcome.ASLEEP and self.awake:
            self.phase = EnginePhase.ASLEEP  # it died between serving and the launcher's noticing
        self._settle(ShardError(message.cause) if message.cause else None)

    def _found(self, another: bool) -> None:
        if self.phase is EnginePhase.WAKING:
            self._settle(None)

    def _settle(self, error: ShardError | None) -> None:
        if self._outcome is None or self._outcome.done():
            return
        if error is None:
            self._outcome.set_result(None)
        else:
            self._outcome.set_exception(error)
