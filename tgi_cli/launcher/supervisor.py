"""Supervises the children of one server from their start to their end.

Everything that happens is an event in one queue, which the main thread handles one at a time. A
model server that has served before is restarted when it dies, while the router stays up. If the
model server dies before it has served, or the router dies, everything ends.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple

from tgi_cli.errors import ExitCode, ShardError
from tgi_cli.launcher.backoff import WINDOW_SECONDS, Restarts
from tgi_cli.launcher.child_process import ChildProcess
from tgi_cli.launcher.health_probe import HEALTH, LIVE, HealthProbe
from tgi_cli.launcher.server_sleep import ServerSleep
from tgi_cli.launcher.watchdog import Watchdog
from tgi_cli.process.control_channel import Command, ControlChannel
from tgi_cli.process.heartbeat import SharedHeartbeat, State
from tgi_cli.process.signals import delivered

log = logging.getLogger(__name__)

_PROBE_SECONDS = 0.05
_ROUTER_MARGIN = 5.0
"""Seconds beyond its own grace period before the router is killed."""
_SERVER_SECONDS = 10.0
"""Seconds before the model server is killed: nothing is in flight when it gets its signal."""


class _Ended(NamedTuple):
    child: ChildProcess


class _Signalled(NamedTuple):
    number: signal.Signals


class _Ready(NamedTuple):
    server: ChildProcess


class _Due(NamedTuple):
    """It is time to restart the model server."""


class _Commanded(NamedTuple):
    """The router asks to stop or start the model server."""

    command: Command


_Event = _Ended | _Signalled | _Ready | _Due | _Commanded


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerParts:
    """The parts of one server.

    Attributes:
        start_server: Starts the model server; returns its process and its heartbeat.
        start_router: Starts the router, while the model server loads.
        probe: Asks the router, whose health shows when the server is ready.
        on_ready: Called once, when the server is ready.
    """

    start_server: Callable[[], tuple[ChildProcess, SharedHeartbeat]]
    start_router: Callable[[], ChildProcess]
    probe: HealthProbe
    on_ready: Callable[[], None]


class Supervisor:
    """Runs a model server and a router as one.

    Args:
        grace: Seconds for requests in flight to finish after a signal.
        restarts: Decides when a model server that died is restarted.
        watchdog_timeout: Seconds without progress after which a process counts as hung; 0 for
            never.
        control: The router's commands. Default: it has none.
    """

    def __init__(
        self,
        grace: float,
        restarts: Restarts,
        watchdog_timeout: float,
        control: ControlChannel | None = None,
    ) -> None:
        self._grace = grace
        self._restarts = restarts
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._quit = threading.Event()
        self._stopping = threading.Event()
        self._timeout = watchdog_timeout
        self._children: list[ChildProcess] = []
        self._server: ChildProcess | None = None
        self._heartbeat: SharedHeartbeat | None = None
        self._control = control
        self._sleep = ServerSleep(control)
        self._router: ChildProcess | None = None
        self._served = False
        self._due: float | None = None
        """When to restart the model server."""
        self._lost_at: float | None = None
        """When the model server was lost, until it serves again."""

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Turn SIGTERM, SIGINT and SIGHUP into events; kill children left over at the end."""
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            numbers.append(signal.SIGHUP)
        with delivered(numbers, lambda number: self._events.put(_Signalled(number))):
            try:
                yield
            finally:
                self._stopping.set()
                self._quit.set()
                self._kill_all()

    def run(self, parts: ServerParts) -> int:
        """Start both, serve until a signal or a death, stop both; return the exit code.

        Raises:
            ShardError, RouterError: A child died without a report of its own, or too often.
        """
        # The router comes up faster if it starts while the model loads.
        self._start_server(parts)
        self._router = self._watch(parts.start_router())
        if self._control is not None:
            self._control.listen(lambda command: self._events.put(_Commanded(command)))
        while True:
            match self._next():
                case _Ready(server):
                    if server is self._server:
                        self._on_ready(parts)
                case _Signalled(number):
                    return self._shut_down(number)
                case _Due():
                    self._start_server(parts)
                case _Commanded(Command.SLEEP):
                    serving = self._served and self._lost_at is None
                    self._sleep.stop(self._server if serving else None)
                case _Commanded(Command.WAKE):
                    if self._sleep.wake():
                        self._start_server(parts)
                case _Ended(child) if child is self._server and self._sleep.ended(self._cause):
                    self._children.remove(child)
                    self._server = None
                case _Ended(child) if child is self._server and self._served:
                    self._lose(child)
                    if self._due is None:
                        return self._give_up(child)
                case _Ended(child) if child is self._server or child is self._router:
                    self._stop(grace=0.0)
                    return child.failed()

    # ------------------------------------------------------------------ the model server

    def _start_server(self, parts: ServerParts) -> None:
        self._due = None
        child, heartbeat = parts.start_server()
        self._server, self._heartbeat = self._watch(child), heartbeat
        Watchdog(self._timeout, self._quit).watch_server(child, heartbeat)
        threading.Thread(
            target=self._await_health,
            args=(child, heartbeat, parts.probe),
            name="probe",
            daemon=True,
        ).start()

    def _await_health(
        self, server: ChildProcess, heartbeat: SharedHeartbeat, probe: HealthProbe
    ) -> None:
        """Ask for /health until it succeeds or this model server ends.

        A router that runs already is asked once the model server can serve, as it logs requests
        that find it unhealthy.
        """
        again = self._served
        while not self._stopping.is_set() and server.running:
            can_serve = not again or heartbeat.read().state >= State.SERVING
            if can_serve and probe.ask(HEALTH) == 200:
                self._events.put(_Ready(server))
                return
            self._stopping.wait(_PROBE_SECONDS)

    def _cause(self) -> str:
        """Why the model server has ended, in its own words if it has reported that."""
        assert self._server is not None
        assert self._heartbeat is not None
        return self._heartbeat.error() or self._server.end().cause

    def _on_ready(self, parts: ServerParts) -> None:
        if self._sleep.woken():
            return
        if self._lost_at is not None:
            log.info("serving again, after %.1f s", time.monotonic() - self._lost_at)
            self._lost_at = None
            return
        self._served = True
        assert self._router is not None
        watchdog = Watchdog(self._timeout, self._stopping)
        watchdog.watch_router(self._router, lambda: parts.probe.ask(LIVE) is not None)
        parts.on_ready()

    def _lose(self, server: ChildProcess) -> None:
        """Schedule the model server's restart, if one is left."""
        now = time.monotonic()
        if server in self._children:
            self._children.remove(server)
        if self._lost_at is None:
            self._lost_at = now
        self._server = None
        wait = self._restarts.next(now)
        if wait is not None:
            self._due = now + wait
            log.error(
                "%s; restarting it in %.1f s (try %d of %d)",
                server.end().cause,
                wait,
                self._restarts.tried,
                self._restarts.most,
            )

    def _give_up(self, server: ChildProcess) -> int:
        self._stop(grace=0.0)
        if not self._restarts.most:
            return server.failed()
        raise ShardError(
            f"{server.end().cause}, after {self._restarts.tried} restarts within "
            f"{WINDOW_SECONDS / 60:g} minutes",
            "see its log above; --max-restarts allows more",
        )

    # ------------------------------------------------------------------ events and ends

    def _next(self) -> _Event:
        if self._due is None:
            return self._events.get()
        try:
            return self._events.get(timeout=max(0.0, self._due - time.monotonic()))
        except Empty:
            return _Due()

    def _watch(self, child: ChildProcess) -> ChildProcess:
        self._children.append(child)

        def wait() -> None:
            child.wait()
            self._events.put(_Ended(child))

        threading.Thread(target=wait, name=f"wait for {child.name}", daemon=True).start()
        return child

    def _shut_down(self, number: signal.Signals) -> int:
        what = "finishing what is in flight (again: stop now)" if self._served else "stopping"
        log.info("%s: %s", number.name, what)
        in_time = self._stop()
        if not in_time:
            return ExitCode.INTERRUPTED
        log.info("stopped")
        return ExitCode.OK

    def _stop(self, grace: float | None = None) -> bool:
        """End the router, which drains, then the model server; False if a second signal came."""
        self._stopping.set()
        grace = self._grace if grace is None else grace
        for child, seconds in (
            (self._router, grace + _ROUTER_MARGIN),
            (self._server, _SERVER_SECONDS),
        ):
            if child is None:
                continue
            child.send(signal.SIGTERM)
            if not self._wait_for(child, seconds):
                self._kill_all()
                return False
        return True

    def _wait_for(self, child: ChildProcess, seconds: float) -> bool:
        """Wait for a child's end and kill it when its time is up; False if a signal came."""
        end = time.monotonic() + seconds
        while child.running:
            try:
                event = self._events.get(timeout=max(0.0, end - time.monotonic()))
            except Empty:
                log.warning("the %s does not end; killing it", child.name)
                child.kill()
                child.wait()
                break
            match event:
                case _Signalled():
                    return False
                case _Commanded():
                    self._sleep.refuse("the server is shutting down")
                case _Ended(ended) if ended is self._server:
                    self._sleep.ended(self._cause)
        return True

    def _kill_all(self) -> None:
        for child in self._children:
            child.kill()
        for child in self._children:
            child.wait()
