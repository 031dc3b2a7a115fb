"""Watches the children of one server: until it is ready, while it serves, and to its end.

Everything that happens is an event in one queue; the main thread takes them one at a time.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from tgi_cli.errors import ExitCode
from tgi_cli.launcher.children import Child
from tgi_cli.rpc.signals import delivered

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
    pass


class Supervisor:
    """Runs a model server and a router as one."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._events: SimpleQueue[_Ended | _Signalled | _Ready] = SimpleQueue()
        self._children: list[Child] = []
        self._quit = threading.Event()

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
                self._quit.set()
                self._kill_all()

    def run(
        self,
        start_server: Callable[[], Child],
        start_router: Callable[[], Child],
        health: tuple[str, int],
        on_ready: Callable[[], None],
        tls: bool = False,
    ) -> int:
        """Start both, serve until a signal or a death, stop both; returns the exit code.

        Args:
            start_server: starts the model server.
            start_router: starts the router; they start side by side.
            health: host and port whose GET /health says when the server is ready.
            on_ready: called once, then.
            tls: whether it speaks HTTPS.

        Raises:
            ShardError, RouterError: a child died without a word of its own.
        """
        # The router comes up faster if it starts while the model loads.
        server, router = self._watch(start_server()), self._watch(start_router())
        threading.Thread(target=self._probe, args=(*health, tls), name="probe", daemon=True).start()
        ready = False
        while True:
            match self._events.get():
                case _Ready():
                    ready = True
                    on_ready()
                case _Signalled(number):
                    what = "finishing what is in flight (again: stop now)" if ready else "stopping"
                    log.info("%s: %s", number.name, what)
                    in_time = self._stop(router, server)
                    if not in_time or (number == signal.SIGINT and not ready):
                        return ExitCode.INTERRUPTED
                    log.info("stopped")
                    return ExitCode.OK
                case _Ended(child):
                    self._stop(router, server, grace=0.0)
                    return child.failed()

    def _watch(self, child: Child) -> Child:
        self._children.append(child)

        def wait() -> None:
            child.wait()
            self._events.put(_Ended(child))

        threading.Thread(target=wait, name=f"wait for {child.name}", daemon=True).start()
        return child

    def _probe(self, host: str, port: int, tls: bool) -> None:
        """Ask for /health until it is well."""
        context = None
        if tls:  # our own child, under an address that its certificate need not name
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        while not self._quit.is_set():
            if context is None:
                connection = http.client.HTTPConnection(host, port, timeout=5.0)
            else:
                connection = http.client.HTTPSConnection(host, port, timeout=5.0, context=context)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    self._events.put(_Ready())
                    return
            except (OSError, http.client.HTTPException):
                pass  # not listening yet
            finally:
                connection.close()
            self._quit.wait(_PROBE_SECONDS)

    def _stop(self, router: Child, server: Child, grace: float | None = None) -> bool:
        """End the router, which drains, then the model server. False: a second signal came."""
        grace = self._grace if grace is None else grace
        for child, seconds in ((router, grace + _ROUTER_MARGIN), (server, _SERVER_SECONDS)):
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
                child.send(signal.SIGKILL)
                child.wait()
                break
            if isinstance(event, _Signalled):
                return False
        return True

    def _kill_all(self) -> None:
        for child in self._children:
            child.send(signal.SIGKILL)
            child.wait()
