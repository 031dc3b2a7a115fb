"""Detects processes that hang: stopped, deadlocked, or stuck on the device.

The watchdog reads the model server's heartbeat (:mod:`tgi_cli.process.heartbeat`) and asks whether
the router answers. It kills a process that hangs; the supervisor handles that like any other death.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from tgi_cli.launcher.child_process import ChildProcess
from tgi_cli.process.heartbeat import (
    HeartbeatReading,
    SharedHeartbeat,
    StallDetector,
    State,
    allowed_seconds,
)

log = logging.getLogger(__name__)

START_SECONDS = 60.0
"""Least timeout before a model server serves: libraries may hold the interpreter while it loads."""

_POLLS = 8
"""Polls within the timeout."""
_MAX_SERVER_INTERVAL = 1.0
_MAX_ROUTER_INTERVAL = 5.0
"""Seconds between two polls at most; each poll of a router costs it a connection."""
_MAX_DELAY = 3.0
"""Intervals that count at most for a poll that is late."""


class ServerWatch:
    """Decides from heartbeats whether one model server hangs.

    Args:
        timeout: Seconds, ``--watchdog-timeout``.
        interval: Seconds between two polls.
    """

    def __init__(self, timeout: float, interval: float) -> None:
        self._timeout = timeout
        self._process = StallDetector(_MAX_DELAY * interval)
        self._engine = StallDetector(_MAX_DELAY * interval)

    def poll(self, reading: HeartbeatReading, now: float) -> str:
        """Return why the model server counts as hung, or an empty string."""
        starting = reading.state < State.SERVING
        allowed = max(self._timeout, START_SECONDS) if starting else self._timeout
        if self._process.poll(reading.beats, now) > allowed:
            return f"the model server has not run for {allowed:g} s: it was stopped, or it hangs"
        allowed = allowed_seconds(self._timeout, reading.step_seconds)
        if self._engine.poll(reading.progress if reading.live else None, now) > allowed:
            return f"no step of the engine has ended for {allowed:g} s while requests wait"
        return ""


class Watchdog:
    """Watches one server's processes, each in a thread.

    Args:
        timeout: Seconds, ``--watchdog-timeout``; 0 to watch nothing.
        stopped: Set when no process needs to be watched any more.
    """

    def __init__(self, timeout: float, stopped: threading.Event) -> None:
        self._timeout = timeout
        self._stopped = stopped

    def watch_server(self, child: ChildProcess, heartbeat: SharedHeartbeat) -> None:
        """Watch the model server until it ends."""
        interval = min(_MAX_SERVER_INTERVAL, self._timeout / _POLLS)
        watch = ServerWatch(self._timeout, interval)
        self._start(child, interval, lambda now: watch.poll(heartbeat.read(), now))

    def watch_router(self, child: ChildProcess, answers: Callable[[], bool]) -> None:
        """Watch the router, which has answered already, until it ends."""
        interval = min(_MAX_ROUTER_INTERVAL, self._timeout / _POLLS)
        detector = StallDetector(_MAX_DELAY * _MAX_ROUTER_INTERVAL)
        answered = 0

        def poll(now: float) -> str:
            nonlocal answered
            answered += answers()
            if detector.poll(answered, now) > self._timeout:
                return f"the router has not answered for {self._timeout:g} s"
            return ""

        self._start(child, interval, poll)

    def _start(self, child: ChildProcess, interval: float, poll: Callable[[float], str]) -> None:
        def run() -> None:
            while child.running and not self._stopped.is_set():
                if (cause := poll(time.monotonic())) and not self._stopped.is_set():
                    log.error("%s; killing it", cause)
                    child.kill_hung(cause)
                    return
                self._stopped.wait(interval)

        if self._timeout > 0:
            threading.Thread(target=run, name=f"watch {child.name}", daemon=True).start()
