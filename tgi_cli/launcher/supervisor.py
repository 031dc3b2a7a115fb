"""Supervises the children of one server from their start to their end.

Everything that happens is an event in one queue, which the main thread handles one at a time. A
model server that has served before is restarted when it dies, while the router stays up, and the
other model servers if there are several. If a model server dies before it has served, or the router
dies, everything ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple

from tgi_cli.errors import ExitCode, ShardError
from tgi_cli.launcher.backoff import WINDOW_SECONDS, Restarts
from tgi_cli.launcher.child_process import ChildProcess
from tgi_cli.launcher.health_probe import LIVE, HealthProbe
from tgi_cli.launcher.model_server import (
    Ended,
    ModelServerParts,
    ModelServerSupervisor,
    Phase,
    Serving,
)
from tgi_cli.launcher.server_sleep import ServerSleep, SleepPhase
from tgi_cli.launcher.watchdog import Watchdog
from tgi_cli.process.control_channel import Command, ControlChannel
from tgi_cli.process.signals import delivered

log = logging.getLogger(__name__)

_ROUTER_MARGIN = 5.0
"""Seconds beyond its own grace period before the router is killed."""
_SERVER_SECONDS = 10.0
"""Seconds before a model server is killed: nothing is in flight when it gets its signal."""


class _Signalled(NamedTuple):
    number: signal.Signals


class _Due(NamedTuple):
    """The time that a model server's supervisor waits for has come."""


class _Commanded(NamedTuple):
    """The router asks to stop or start the model servers."""

    command: Command


_Event = Ended | Serving | _Signalled | _Due | _Commanded


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerParts:
    """The parts of one server.

    Attributes:
        model_servers: How to start each model server; several are replicas of each other.
        start_router: Starts the router, while the model servers load.
        probe: Asks the router.
        on_ready: Called once, when all model servers can be used.
    """

    model_servers: Sequence[ModelServerParts]
    start_router: Callable[[], ChildProcess]
    probe: HealthProbe
    on_ready: Callable[[], None]


class Supervisor:
    """Runs model servers and a router as one.

    Args:
        grace: Seconds for requests in flight to finish after a signal.
        restarts: Makes what decides when a model server that died is restarted, one for each.
        watchdog_timeout: Seconds without progress after which a process counts as hung; 0 for
            never.
        control: The router's commands. Default: it has none.
    """

    def __init__(
        self,
        grace: float,
        restarts: Callable[[], Restarts],
        watchdog_timeout: float,
        control: ControlChannel | None = None,
    ) -> None:
        self._grace = grace
        self._make_restarts = restarts
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._quit = threading.Event()
        self._stopping = threading.Event()
        self._timeout = watchdog_timeout
        self._servers: list[ModelServerSupervisor] = []
        self._control = control
        self._sleep = ServerSleep(control)
        self._router: ChildProcess | None = None
        self._ready = False
        self._rolling: deque[ModelServerSupervisor] | None = None
        """Model servers that a rolling restart has yet to restart, or None if there is none."""

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
                for server in self._servers:
                    server.close()
                self._kill_all()

    def run(self, parts: ServerParts) -> int:
        """Start all, serve until a signal or a death, stop all; return the exit code.

        Raises:
            ShardError, RouterError: A child died without a report of its own, or too often.
        """
        watchdog = Watchdog(self._timeout, self._quit)
        self._servers = [
            ModelServerSupervisor(
                each, self._grace, self._make_restarts(), watchdog, self._events.put
            )
            for each in parts.model_servers
        ]
        # The router comes up faster if it starts while the model loads.
        for each in self._servers:
            each.start()
        self._router = self._watch(parts.start_router())
        if self._control is not None:
            self._control.listen(lambda command: self._events.put(_Commanded(command)))
        while True:
            match self._next():
                case Serving(child) if server := self._server_of(child):
                    server.has_served()
                    self._sleep.has_served(self._servers)
                    self._check_ready(parts)
                case _Signalled(signal.SIGHUP) if self._ready and self._reloads:
                    self._restart_all()
                case _Signalled(number):
                    return self._shut_down(number)
                case _Due():
                    self._run_due()
                case _Commanded(command):
                    self._sleep.run(command, self._servers)
                case Ended(child) if child is self._router:
                    self._stop(grace=0.0)
                    return child.failed()
                case Ended(child) if server := self._server_of(child):
                    code = self._handle_end(server, child)
                    if code is not None:
                        return code
            self._roll()

    # ------------------------------------------------------------------ model servers

    def _run_due(self) -> None:
        for server in self._servers:
            if server.due is not None and server.due <= time.monotonic():
                server.run_due()

    def _server_of(self, child: ChildProcess) -> ModelServerSupervisor | None:
        return next((server for server in self._servers if server.child is child), None)

    def _check_ready(self, parts: ServerParts) -> None:
        if self._ready or not all(server.served for server in self._servers):
            return
        self._ready = True
        assert self._router is not None
        watchdog = Watchdog(self._timeout, self._stopping)
        watchdog.watch_router(self._router, lambda: parts.probe.ask(LIVE) is not None)
        parts.on_ready()

    def _handle_end(self, server: ModelServerSupervisor, child: ChildProcess) -> int | None:
        """A model server has ended; returns the exit code if everything ends with it."""
        if self._sleep.has_ended(server, self._servers) or server.has_ended():
            return None
        if not server.served:
            self._stop(grace=0.0)
            return child.failed()
        if any(other.phase is Phase.SERVING for other in self._servers):
            server.wait_for_restart()
            return None
        self._stop(grace=0.0)
        restarts = server.restarts
        if not restarts.most:
            return child.failed()
        raise ShardError(
            f"{child.end().cause}, after {restarts.tried} restarts within "
            f"{WINDOW_SECONDS / 60:g} minutes",
            "see its log above; --max-restarts allows more",
        )

    # ------------------------------------------------------------------ rolling restart

    @property
    def _reloads(self) -> bool:
        """Whether SIGHUP restarts the model servers one by one, as it reloads other daemons.

        A command with a controlling terminal gets it when the terminal is gone, and ends.
        """
        return len(self._servers) > 1 and not _has_terminal()

    def _restart_all(self) -> None:
        if self._sleep.phase is not SleepPhase.AWAKE:
            log.info("SIGHUP: the model servers sleep")
            return
        if self._rolling is not None:
            log.info("SIGHUP: a rolling restart is in progress")
            return
        log.info("SIGHUP: restarting the %d model servers one by one", len(self._servers))
        self._rolling = deque()
        for server in self._servers:
            if server.phase is Phase.SERVING:
                self._rolling.append(server)
            elif server.phase is not Phase.STARTING:
                server.restart()

    def _roll(self) -> None:
        """Take the next step of a rolling restart, once all model servers serve."""
        if self._rolling is None or any(
            server.phase is not Phase.SERVING for server in self._servers
        ):
            return
        if self._rolling:
            self._rolling.popleft().restart()
        else:
            self._rolling = None
            log.info("all model servers have been restarted")

    # ------------------------------------------------------------------ events and ends

    def _next(self) -> _Event:
        due = [server.due for server in self._servers if server.due is not None]
        if not due:
            return self._events.get()
        try:
            return self._events.get(timeout=max(0.0, min(due) - time.monotonic()))
        except Empty:
            return _Due()

    def _watch(self, child: ChildProcess) -> ChildProcess:
        def wait() -> None:
            child.wait()
            self._events.put(Ended(child))

        threading.Thread(target=wait, name=f"wait for {child.name}", daemon=True).start()
        return child

    def _shut_down(self, number: signal.Signals) -> int:
        what = "finishing what is in flight (again: stop now)" if self._ready else "stopping"
        log.info("%s: %s", number.name, what)
        in_time = self._stop()
        if not in_time:
            return ExitCode.INTERRUPTED
        log.info("stopped")
        return ExitCode.OK

    def _stop(self, grace: float | None = None) -> bool:
        """End the router, which drains, then the model servers; False if a second signal came."""
        self._stopping.set()
        for server in self._servers:
            server.close()
        grace = self._grace if grace is None else grace
        servers = [server.child for server in self._servers if server.child is not None]
        for children, seconds in (
            ([self._router] if self._router is not None else [], grace + _ROUTER_MARGIN),
            (servers, _SERVER_SECONDS),
        ):
            for child in children:
                child.send(signal.SIGTERM)
            end = time.monotonic() + seconds
            if not all(self._wait_for(child, end) for child in children):
                self._kill_all()
                return False
        return True

    def _wait_for(self, child: ChildProcess, end: float) -> bool:
        """Wait for a child's end and kill it when its time is up; False if a signal came."""
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
                case Ended(ended) if server := self._server_of(ended):
                    self._sleep.has_ended(server, self._servers)
        return True

    def _kill_all(self) -> None:
        children = [server.child for server in self._servers]
        for child in (self._router, *children):
            if child is not None:
                child.kill()
        for child in (self._router, *children):
            if child is not None:
                child.wait()


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
