"""Supervises one model server: starts, drains, stops and restarts it."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tgi_cli.launcher.backoff import Restarts
from tgi_cli.launcher.child_process import ChildProcess
from tgi_cli.launcher.watchdog import Watchdog
from tgi_cli.process.heartbeat import SharedHeartbeat, State

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
DRAIN_MARGIN = 10.0
"""Seconds beyond its grace period before a model server is killed."""


class Phase(Enum):
    """Phase of a model server, as the launcher sees it."""

    STOPPED = "stopped"
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    """It got SIGTERM: requests in flight finish, then it ends."""
    WAITING = "waiting"
    """It died, and is restarted when the back-off has elapsed."""


class Ended(NamedTuple):
    """A child has ended."""

    child: ChildProcess


class Serving(NamedTuple):
    """A model server can be used by the router."""

    child: ChildProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelServerParts:
    """How to start one model server and to see that the router uses it.

    Attributes:
        start: Starts the process; returns it and its heartbeat.
        usable: Asks the router whether it can use this model server. Called in a thread.
    """

    start: Callable[[], tuple[ChildProcess, SharedHeartbeat]]
    usable: Callable[[], bool]


class ModelServerSupervisor:
    """Keeps one model server running.

    Its methods return at once, and belong to one thread, which passes on the events of others.

    Args:
        parts: How to start it.
        grace: Seconds for its requests in flight after :meth:`stop` or :meth:`restart`.
        restarts: Decides when it is restarted after it died.
        watchdog: Kills its process if that hangs.
        post: Called from other threads with what happens to it.

    Attributes:
        child: Its process, or None if there is none.
        phase: What it does.
        served: Whether it has served before.
    """

    def __init__(
        self,
        parts: ModelServerParts,
        grace: float,
        restarts: Restarts,
        watchdog: Watchdog,
        post: Callable[[Ended | Serving], None],
    ) -> None:
        self.child: ChildProcess | None = None
        self.phase = Phase.STOPPED
        self.served = False
        self._parts = parts
        self._heartbeat: SharedHeartbeat | None = None
        self._grace = grace
        self.restarts = restarts
        self._watchdog = watchdog
        self._post = post
        self._start_again = False
        self._closed = threading.Event()
        self._due: float | None = None
        self._lost_at: float | None = None
        """When it was lost or restarted, until it serves again."""

    # ------------------------------------------------------------------ what it should do

    def start(self) -> None:
        """Start the process; :class:`Serving` is posted when the router can use it."""
        self._due, self._start_again = None, False
        self.phase = Phase.STARTING
        child, heartbeat = self._parts.start()
        self.child, self._heartbeat = child, heartbeat
        self._post_end_of(child)
        self._watchdog.watch_server(child, heartbeat)
        threading.Thread(
            target=self._await_health, args=(child, heartbeat), name="probe", daemon=True
        ).start()

    def stop(self) -> None:
        """Let requests in flight finish, then end the process. It is not started again."""
        self._start_again = False
        if self.phase in (Phase.STARTING, Phase.SERVING) and self.child is not None:
            self.phase = Phase.DRAINING
            self._due = time.monotonic() + self._grace + DRAIN_MARGIN
            self.child.send(signal.SIGTERM)
        elif self.phase is Phase.WAITING:
            self.phase, self._due = Phase.STOPPED, None

    def restart(self) -> None:
        """As :meth:`stop`, then :meth:`start`; it does not count as a restart after a failure."""
        self._lost_at = time.monotonic()
        if self.phase in (Phase.STOPPED, Phase.WAITING):
            self.start()
            return
        self.stop()
        self._start_again = True

    def close(self) -> None:
        """Never start it again: everything ends."""
        self._closed.set()
        self._due, self._start_again = None, False

    # ------------------------------------------------------------------ what happens to it

    def has_served(self) -> None:
        """The router can use it."""
        if self.phase is not Phase.STARTING:
            return
        self.phase = Phase.SERVING
        if self._lost_at is not None:
            seconds = time.monotonic() - self._lost_at
            log.info("%s: serving again, after %.1f s", self._name, seconds)
            self._lost_at = None
        self.served = True

    def has_ended(self) -> bool:
        """Its process has ended. Returns False if nothing will start it again.

        That is so if it has not served before, or if it was restarted too often; then
        :meth:`wait_for_restart` may keep it.
        """
        if self.phase is Phase.DRAINING:
            self.phase, self._due = Phase.STOPPED, None
            if self._start_again:
                self.start()
            return True
        self.phase = Phase.STOPPED
        if not self.served:
            return False
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
        wait = self.restarts.next(now)
        if wait is None:
            return False
        self.phase, self._due = Phase.WAITING, now + wait
        log.error(
            "%s; restarting it in %.1f s (try %d of %d)",
            self._cause,
            wait,
            self.restarts.tried,
            self.restarts.most,
        )
        return True

    def wait_for_restart(self) -> None:
        """After too many restarts, wait until their limit allows another one, if it ever does."""
        now = time.monotonic()
        wait = self.restarts.next_allowed(now)
        if wait is None:
            log.error("%s; it stays down, as --max-restarts is 0", self._cause)
            return
        self.phase, self._due = Phase.WAITING, now + wait
        log.error(
            "%s, after %d restarts; the next in %.0f s", self._cause, self.restarts.most, wait
        )

    @property
    def due(self) -> float | None:
        """Time of ``time.monotonic()`` at which :meth:`run_due` is to be called, or None."""
        return self._due

    def run_due(self) -> None:
        """Restart it, or kill it if it does not drain in time."""
        self._due = None
        if self.phase is Phase.WAITING:
            self.start()
        elif self.phase is Phase.DRAINING and self.child is not None:
            log.warning("%s: does not end; killing it", self._name)
            self.child.kill()

    # ------------------------------------------------------------------ threads

    def _post_end_of(self, child: ChildProcess) -> None:
        def wait() -> None:
            child.wait()
            self._post(Ended(child))

        threading.Thread(target=wait, name=f"wait for {child.name}", daemon=True).start()

    def _await_health(self, child: ChildProcess, heartbeat: SharedHeartbeat) -> None:
        """Ask the router until it can use this model server, or the process ends.

        A router that runs already is asked once the model server can serve, as it logs requests
        that find it unhealthy.
        """
        again = self.served
        while not self._closed.is_set() and child.running:
            can_serve = not again or heartbeat.read().state >= State.SERVING
            if can_serve and self._parts.usable():
                self._post(Serving(child))
                return
            self._closed.wait(_POLL_SECONDS)

    @property
    def reported_cause(self) -> str:
        """Why its process ended, in its own words if it has reported that."""
        reported = "" if self._heartbeat is None else self._heartbeat.error()
        return reported or self._cause

    @property
    def _name(self) -> str:
        return "model server" if self.child is None else self.child.name

    @property
    def _cause(self) -> str:
        """Why its process ended."""
        assert self.child is not None
        return self.child.end().cause
