"""Watches the children of one server: until it is ready, while it serves, and to its end.

Everything that happens is an event in one queue; the main thread takes them one at a time. A
model server that has served before is started again when it dies, while the router stays up; one
that has never served, and a router, take everything down with them.
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

from tgi_cli.errors import ExitCode, ShardError
from tgi_cli.launcher.backoff import WINDOW_SECONDS, Restarts
from tgi_cli.launcher.child_process import Child
from tgi_cli.launcher.health_probe import HEALTH, LIVE, Probe
from tgi_cli.launcher.watchdog import Watchdog
from tgi_cli.process.heartbeat import SharedHeartbeat, State
from tgi_cli.process.signals import delivered

log = logging.getLogger(__name__)

_PROBE_SECONDS = 0.05
_ROUTER_MARGIN = 5.0
"""What the router gets beyond its own grace period before it is killed."""
_SERVER_SECONDS = 10.0
"""What the model server gets: nothing is in flight any more when it is told."""


@dataclass(frozen=True, slots=True)
class _Ended:
    child: Child


@dataclass(frozen=True, slots=True)
class _Signalled:
    number: signal.Signals


@dataclass(frozen=True, slots=True)
class _Ready:
    server: Child


@dataclass(frozen=True, slots=True)
class _Due:
    """It is time to start the model server again."""


_Event = _Ended | _Signalled | _Ready | _Due


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a server is made of.

    Attributes:
        start_server: starts the model server, and says where its pulse is.
        start_router: starts the router; they start side by side.
        probe: asks the router; its health says when the server is ready.
        on_ready: called once, then.
    """

    start_server: Callable[[], tuple[Child, SharedHeartbeat]]
    start_router: Callable[[], Child]
    probe: Probe
    on_ready: Callable[[], None]


class Supervisor:
    """Runs a model server and a router as one.

    Args:
        grace: seconds that requests in flight get after a signal.
        restarts: when a model server that has died may start again.
        watchdog_timeout: seconds without a movement after which a process hangs; 0: none does.
    """

    def __init__(self, grace: float, restarts: Restarts, watchdog_timeout: float) -> None:
        self._grace = grace
        self._restarts = restarts
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._quit = threading.Event()
        self._stopping = threading.Event()
        self._timeout = watchdog_timeout
        self._children: list[Child] = []
        self._server: Child | None = None
        self._router: Child | None = None
        self._served = False
        self._due: float | None = None
        """When the model server is to be started again."""
        self._lost_at: float | None = None
        """When it was there last, while it is not."""

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """SIGTERM, SIGINT and SIGHUP become events; whatever happens, no child is left over."""
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

    def run(self, parts: Parts) -> int:
        """Start both, serve until a signal or a death, stop both; returns the exit code.

        Raises:
            ShardError, RouterError: a child died without a word of its own, or too often.
        """
        # The router comes up faster if it starts while the model loads.
        self._start_server(parts)
        self._router = self._watch(parts.start_router())
        while True:
            match self._next():
                case _Ready(server):
                    if server is self._server:
                        self._on_ready(parts)
                case _Signalled(number):
                    return self._shut_down(number)
                case _Due():
                    self._start_server(parts)
                case _Ended(child) if child is self._server and self._served:
                    self._lose(child)
                    if self._due is None:
                        return self._give_up(child)
                case _Ended(child) if child is self._server or child is self._router:
                    self._stop(grace=0.0)
                    return child.failed()

    # ------------------------------------------------------------------ the model server's lives

    def _start_server(self, parts: Parts) -> None:
        self._due = None
        child, pulse = parts.start_server()
        self._server = self._watch(child)
        Watchdog(self._timeout, self._quit).watch_server(child, pulse)
        threading.Thread(
            target=self._await_health, args=(child, pulse, parts.probe), name="probe", daemon=True
        ).start()

    def _await_health(self, server: Child, pulse: SharedHeartbeat, probe: Probe) -> None:
        """Ask for /health until it is well, or this model server is over.

        A router that is there already is asked when the model server can serve, not before: it
        logs who finds it unwell.
        """
        again = self._served
        while not self._quit.is_set() and server.running:
            can_serve = not again or pulse.read().state >= State.SERVING
            if can_serve and probe.ask(HEALTH) == 200:
                self._events.put(_Ready(server))
                return
            self._quit.wait(_PROBE_SECONDS)

    def _on_ready(self, parts: Parts) -> None:
        if self._lost_at is not None:
            log.info("serving again, after %.1f s", time.monotonic() - self._lost_at)
            self._lost_at = None
            return
        self._served = True
        assert self._router is not None
        watchdog = Watchdog(self._timeout, self._stopping)
        watchdog.watch_router(self._router, lambda: parts.probe.ask(LIVE) is not None)
        parts.on_ready()

    def _lose(self, server: Child) -> None:
        """Plan the model server's return, if there may be one."""
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
                "%s; starting it again in %.1f s (try %d of %d)",
                server.end().cause,
                wait,
                self._restarts.tried,
                self._restarts.most,
            )

    def _give_up(self, server: Child) -> int:
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

    def _watch(self, child: Child) -> Child:
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
        if not in_time or (number == signal.SIGINT and not self._served):
            return ExitCode.INTERRUPTED
        log.info("stopped")
        return ExitCode.OK

    def _stop(self, grace: float | None = None) -> bool:
        """End the router, which drains, then the model server. False: a second signal came."""
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

    def _wait_for(self, child: Child, seconds: float) -> bool:
        """Wait for a child's end, and kill it when its time is up. False: a signal came."""
        end = time.monotonic() + seconds
        while child.running:
            try:
                event = self._events.get(timeout=max(0.0, end - time.monotonic()))
            except Empty:
                log.warning("the %s does not end; killing it", child.name)
                child.kill()
                child.wait()
                break
            if isinstance(event, _Signalled):
                return False
        return True

    def _kill_all(self) -> None:
        for child in self._children:
            child.kill()
        for child in self._children:
            child.wait()
