"""The model server of one replica, supervised from threads of the replica's process.

The process is Ray's: its main thread and its signals are not ours. So there is no launcher; the
model server's own supervisor, watchdog and back-off are those of ``tgi serve``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from tgi_cli.config import ServeConfig
from tgi_cli.errors import ShardError, TgiError
from tgi_cli.launcher.backoff import Restarts
from tgi_cli.launcher.model_server import (
    Ended,
    ModelServerParts,
    ModelServerSupervisor,
    Phase,
    Serving,
)
from tgi_cli.launcher.watchdog import Watchdog

log = logging.getLogger(__name__)


class _Stop:
    """The model server is to end."""


class ReplicaServer:
    """Starts a model server, restarts it when it dies, and ends it.

    Args:
        parts: How to start it, and whether the router can use it.
        serve: The settings, of which those of restarts and of the watchdog apply.
        on_failure: Called from a thread when the model server has ended and is not started again.
    """

    def __init__(
        self,
        parts: ModelServerParts,
        serve: ServeConfig,
        on_failure: Callable[[TgiError], None],
    ) -> None:
        self._events: SimpleQueue[Ended | Serving | _Stop] = SimpleQueue()
        self._stopped = threading.Event()
        self._on_failure = on_failure
        self._server = ModelServerSupervisor(
            parts,
            0.0,  # the replica has no requests when it stops
            Restarts(serve.max_restarts),
            Watchdog(serve.watchdog_timeout, self._stopped),
            self._events.put,
        )
        self._thread = threading.Thread(target=self._run, name="model server", daemon=True)

    def start(self) -> None:
        """Start the model server; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """End the model server; returns when it has ended."""
        self._stopped.set()
        self._events.put(_Stop())
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._supervise()
        except Exception as error:
            log.exception("the model server's supervisor failed")
            self._on_failure(ShardError(f"the model server cannot be started: {error}"))

    def _supervise(self) -> None:
        server = self._server
        server.start()
        stopping = False
        while not (stopping and server.phase is Phase.STOPPED):
            match self._next_event():
                case Serving(child) if child is server.child:
                    server.has_served()
                case Ended(child) if child is server.child:
                    if not server.has_ended() and not stopping:
                        failure = child.end()
                        cause = server.reported_cause
                        self._on_failure(type(failure)(cause, failure.remedy))
                        return
                case _Stop():
                    stopping = True
                    server.close()
                    server.stop()
                case None:
                    server.run_due()

    def _next_event(self) -> Ended | Serving | _Stop | None:
        """The next event, or None when it is time for what the supervisor waits for."""
        due = self._server.due
        try:
            return self._events.get(
                timeout=None if due is None else max(0.0, due - time.monotonic())
            )
        except Empty:
            return None
