"""Stops the model servers when the router says that they are idle, and starts them for a request.

A server that sleeps is a router and a launcher without model servers: all memory of the model is
returned. This is no failure, so that no restart is counted and none is delayed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from enum import Enum, auto

from tgi_cli.launcher.model_server import ModelServerSupervisor, Phase
from tgi_cli.process.control_channel import Command, ControlChannel, Outcome

log = logging.getLogger(__name__)


class SleepPhase(Enum):
    """Whether the model servers run."""

    AWAKE = auto()
    STOPPING = auto()
    ASLEEP = auto()
    WAKING = auto()


class ServerSleep:
    """The sleep of all model servers of one server. Belongs to the supervisor's thread.

    Args:
        control: Answers the router; None if it never asks.
    """

    def __init__(self, control: ControlChannel | None) -> None:
        self.phase = SleepPhase.AWAKE
        self._control = control
        self._cause = ""
        """Why the wake failed that is being undone."""
        self._since = 0.0
        """Time of the last command that was carried out."""

    def run(self, command: Command, servers: Sequence[ModelServerSupervisor]) -> None:
        """Carry out the router's command, or refuse it."""
        if command is Command.SLEEP:
            if any(server.phase is not Phase.SERVING for server in servers):
                self.refuse("the model server does not serve at the moment")
                return
            self._cause = ""
            self._stop(servers)
        elif self.phase is not SleepPhase.ASLEEP:
            self.refuse("the model server is not asleep")
        else:
            log.info("waking the model server for a request")
            self.phase, self._since = SleepPhase.WAKING, time.monotonic()
            for server in servers:
                server.start()

    def has_served(self, servers: Sequence[ModelServerSupervisor]) -> None:
        """Note that one of the model servers serves."""
        serving = all(server.phase is Phase.SERVING for server in servers)
        if serving and self.phase is SleepPhase.WAKING:
            self.phase = SleepPhase.AWAKE
            log.info("awake after %.1f s", time.monotonic() - self._since)

    def has_ended(
        self, server: ModelServerSupervisor, servers: Sequence[ModelServerSupervisor]
    ) -> bool:
        """One of them has ended; returns whether that belongs to the sleep.

        If one fails to start, all of them go on sleeping.
        """
        if self.phase not in (SleepPhase.STOPPING, SleepPhase.WAKING):
            return False
        if self.phase is SleepPhase.WAKING:
            self._cause = server.reported_cause
            log.error("%s, while it woke; the next request tries again", self._cause)
            self._stop(servers)
        server.has_ended()
        if all(each.phase is Phase.STOPPED for each in servers):
            self.phase = SleepPhase.ASLEEP
            if not self._cause:
                log.info("asleep; the next request starts the model server again")
            if self._control is not None:
                self._control.reply(Outcome.ASLEEP, self._cause)
        return True

    def refuse(self, cause: str) -> None:
        """Answer that a command is not carried out."""
        if self._control is not None:
            self._control.reply(Outcome.REFUSED, cause)

    def _stop(self, servers: Sequence[ModelServerSupervisor]) -> None:
        self.phase, self._since = SleepPhase.STOPPING, time.monotonic()
        for server in servers:
            server.stop()
