"""Finds processes that are there and do not move: stopped, deadlocked, or stuck on the device.

It watches the model server's heartbeat (:mod:`tgi_cli.process.heartbeat`) and whether the router
answers. It kills a process that hangs; the supervisor then handles it like any other death.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from tgi_cli.launcher.child_process import Child
from tgi_cli.process.heartbeat import (
    Reading,
    SharedHeartbeat,
    StallDetector,
    State,
    allowed_seconds,
)

log = logging.getLogger(__name__)

START_SECONDS = 60.0
"""Without a beat before a model server serves, at least: while it loads, libraries may hold the
interpreter for a while."""

_LOOKS = 8
"""Within the timeout."""
_SERVER_LOOK = 1.0
_ROUTER_LOOK = 5.0
"""Seconds between two of them at most: a router's costs it a connection."""
_LATE = 3.0
"""Looks that are this many times later than they should be are counted as that late at most."""


class ServerWatch:
    """Judges the readings of one model server's pulse.

    Args:
        timeout: seconds, ``--watchdog-timeout``.
        interval: seconds between two looks.
    """

    def __init__(self, timeout: float, interval: float) -> None:
        self._timeout = timeout
        self._process = StallDetector(_LATE * interval)
        self._engine = StallDetector(_LATE * interval)

    def look(self, reading: Reading, now: float) -> str:
        """Why the model server counts as hung; empty: it does not."""
        starting = reading.state < State.SERVING
        allowed = max(self._timeout, START_SECONDS) if starting else self._timeout
        if self._process.look(reading.beats, now) > allowed:
            return f"the model server has not run for {allowed:g} s: it was stopped, or it hangs"
        allowed = allowed_seconds(self._timeout, reading.step_seconds)
        if self._engine.look(reading.progress if reading.live else None, now) > allowed:
            return f"no step of the engine has ended for {allowed:g} s while requests wait"
        return ""


class Watchdog:
    """Watches one server's processes, each in a thread; ``timeout`` 0: it does not.

    Args:
        timeout: seconds, ``--watchdog-timeout``.
        over: set when nobody needs to be watched any more.
    """

    def __init__(self, timeout: float, over: threading.Event) -> None:
        self._timeout = timeout
        self._over = over

    def watch_server(self, child: Child, pulse: SharedHeartbeat) -> None:
        """Until its end, or that of all."""
        interval = min(_SERVER_LOOK, self._timeout / _LOOKS)
        watch = ServerWatch(self._timeout, interval)
        self._start(child, interval, lambda now: watch.look(pulse.read(), now))

    def watch_router(self, child: Child, answers: Callable[[], bool]) -> None:
        """Likewise, from the moment on at which it has answered."""
        interval = min(_ROUTER_LOOK, self._timeout / _LOOKS)
        still = StallDetector(_LATE * _ROUTER_LOOK)
        answered = 0

        def look(now: float) -> str:
            nonlocal answered
            answered += answers()
            if still.look(answered, now) > self._timeout:
                return f"the router has not answered for {self._timeout:g} s"
            return ""

        self._start(child, interval, look)

    def _start(self, child: Child, interval: float, look: Callable[[float], str]) -> None:
        def run() -> None:
            while child.running and not self._over.is_set():
                if (cause := look(time.monotonic())) and not self._over.is_set():
                    log.error("%s; killing it", cause)
                    child.kill_hung(cause)
                    return
                self._over.wait(interval)

        if self._timeout > 0:
            threading.Thread(target=run, name=f"watch {child.name}", daemon=True).start()
