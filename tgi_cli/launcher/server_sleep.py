"""Stops the model server when the router says that it is idle, and starts it for a request.

A sleeping server is a router and a launcher without a model server: all memory of the model is
returned. This is no failure, so that no restart is counted and none is delayed.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from enum import Enum, auto

from tgi_cli.launcher.child_process import ChildProcess
from tgi_cli.process.control_channel import ControlChannel, Outcome

log = logging.getLogger(__name__)

_STOP_SECONDS = 10.0
"""Seconds before a model server is killed that does not end: it has no requests."""


class SleepPhase(Enum):
    """Whether the model server runs."""

    AWAKE = auto()
    STOPPING = auto()
    ASLEEP = auto()
    WAKING = auto()


class ServerSleep:
    """The model server's sleep, as the supervisor's events change it.

    Args:
        control: Answers the router; None if it never asks.
    """

    def __init__(self, control: ControlChannel | None) -> None:
        self.phase = SleepPhase.AWAKE
        self._control = control
        self._killing: threading.Timer | None = None
        self._since = 0.0
        """Time of the last command that was carried out."""

    def stop(self, server: ChildProcess | None) -> None:
        """Stop a model server that serves; refuse if there is None."""
        if server is None or self.phase not in (SleepPhase.AWAKE, SleepPhase.WAKING):
            self.refuse("the model server does not serve at the moment")
            return
        self.phase, self._since = SleepPhase.STOPPING, time.monotonic()
        server.send(signal.SIGTERM)
        self._killing = threading.Timer(_STOP_SECONDS, server.kill)
        self._killing.daemon = True
        self._killing.start()

    def wake(self) -> bool:
        """Return whether the model server is to be started."""
        if self.phase is not SleepPhase.ASLEEP:
            self.refuse("the model server is not asleep")
            return False
        self.phase, self._since = SleepPhase.WAKING, time.monotonic()
        log.info("waking the model server for a request")
        return True

    def woken(self) -> bool:
        """The model server serves; return whether it was asleep before."""
        if self.phase is not SleepPhase.WAKING:
            return False
        self.phase = SleepPhase.AWAKE
        log.info("awake after %.1f s", time.monotonic() - self._since)
        return True

    def ended(self, why: Callable[[], str]) -> bool:
        """The model server has ended; return whether it sleeps now.

        Args:
            why: Returns the cause, if that was not on request.
        """
        if self._killing is not None:
            self._killing.cancel()
            self._killing = None
        if self.phase not in (SleepPhase.STOPPING, SleepPhase.WAKING):
            return False
        if self.phase is SleepPhase.STOPPING:
            cause = ""
            log.info("asleep: the model server has ended, the next request starts it again")
        else:
            cause = why()
            log.error("%s while it woke; the next request tries again", cause)
        self.phase = SleepPhase.ASLEEP
        if self._control is not None:
            self._control.reply(Outcome.ASLEEP, cause)
        return True

    def refuse(self, cause: str) -> None:
        """Answer that a command is not carried out."""
        if self._control is not None:
            self._control.reply(Outcome.REFUSED, cause)
