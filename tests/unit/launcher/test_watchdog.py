"""What counts as hung, and what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tgi_cli.launcher.watchdog import START_SECONDS, ServerWatch
from tgi_cli.process.heartbeat import PATIENCE, HeartbeatReading, State

TIMEOUT = 10.0
SERVING = HeartbeatReading(beats=0, state=State.SERVING, progress=5, live=0, step_seconds=0.0)


class Looks:
    """A watch that is asked once a second, of a process that beats unless it is said not to."""

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self._watch = ServerWatch(timeout, interval=1.0)
        self.now = 100.0
        self._beats = 0

    def after(self, seconds: int, reading: HeartbeatReading, beats: bool = True) -> str:
        """The verdict, once this has been so for some seconds."""
        cause = ""
        for _ in range(seconds):
            self.now += 1.0
            self._beats += beats
            cause = cause or self._watch.poll(replace(reading, beats=self._beats), self.now)
        return cause


def test_an_idle_server_never_counts_as_hung() -> None:
    assert Looks().after(1000, SERVING) == ""


def test_an_idle_server_without_heartbeats_counts_as_hung() -> None:
    looks = Looks()
    assert looks.after(int(TIMEOUT), SERVING, beats=False) == ""
    assert looks.after(3, SERVING, beats=False) == (
        "the model server has not run for 10 s: it was stopped, or it hangs"
    )


def test_requests_without_a_step_are_a_hang() -> None:
    looks = Looks()
    busy = replace(SERVING, live=3)
    assert looks.after(int(TIMEOUT), busy) == ""
    assert looks.after(3, busy) == "no step of the engine has ended for 10 s while requests wait"


def test_finished_steps_are_progress() -> None:
    looks = Looks()
    for step in range(5):
        assert looks.after(9, replace(SERVING, live=100, progress=step)) == ""


def test_idle_time_does_not_count() -> None:
    looks = Looks()
    for _ in range(5):
        assert looks.after(8, replace(SERVING, live=1)) == ""
        assert looks.after(1, SERVING) == ""


def test_long_steps_extend_the_timeout() -> None:
    slow = replace(SERVING, live=1, step_seconds=20.0)
    looks = Looks()
    assert looks.after(int(PATIENCE * 20), slow) == ""
    assert "for 80 s" in looks.after(3, slow)


@pytest.mark.parametrize("state", [State.STARTING, State.LOADING, State.WARMING_UP])
def test_loading_may_take_long_and_skip_heartbeats(state: State) -> None:
    starting = replace(SERVING, state=state)
    assert Looks().after(1000, starting) == ""
    looks = Looks()
    assert looks.after(int(START_SECONDS), starting, beats=False) == ""
    assert "has not run for 60 s" in looks.after(3, starting, beats=False)


def test_time_without_polls_does_not_count() -> None:
    """The launcher was stopped itself, or the machine slept."""
    looks = Looks()
    assert looks.after(5, replace(SERVING, live=1), beats=False) == ""
    looks.now += 3600.0
    assert looks.after(1, replace(SERVING, live=1), beats=False) == ""
