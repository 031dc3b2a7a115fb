"""Which processes count as hung."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tgi_cli.launcher.watchdog import START_SECONDS, ServerWatch
from tgi_cli.process.heartbeat import PATIENCE, HeartbeatReading, State

TIMEOUT = 10.0
SERVING = HeartbeatReading(beats=0, state=State.SERVING, progress=5, live=0, step_seconds=0.0)


class Polls:
    """A watch that is polled once a second; the process beats by default."""

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
    assert Polls().after(1000, SERVING) == ""


def test_an_idle_server_without_heartbeats_counts_as_hung() -> None:
    polls = Polls()
    assert polls.after(int(TIMEOUT), SERVING, beats=False) == ""
    assert polls.after(3, SERVING, beats=False) == (
        "the model server has not run for 10 s: it was stopped, or it hangs"
    )


def test_requests_without_a_step_are_a_hang() -> None:
    polls = Polls()
    busy = replace(SERVING, live=3)
    assert polls.after(int(TIMEOUT), busy) == ""
    assert polls.after(3, busy) == "no step of the engine has ended for 10 s while requests wait"


def test_finished_steps_are_progress() -> None:
    polls = Polls()
    for step in range(5):
        assert polls.after(9, replace(SERVING, live=100, progress=step)) == ""


def test_idle_time_does_not_count() -> None:
    polls = Polls()
    for _ in range(5):
        assert polls.after(8, replace(SERVING, live=1)) == ""
        assert polls.after(1, SERVING) == ""


def test_long_steps_extend_the_timeout() -> None:
    slow = replace(SERVING, live=1, step_seconds=20.0)
    polls = Polls()
    assert polls.after(int(PATIENCE * 20), slow) == ""
    assert "for 80 s" in polls.after(3, slow)


@pytest.mark.parametrize("state", [State.STARTING, State.LOADING, State.WARMING_UP])
def test_loading_may_take_long_and_skip_heartbeats(state: State) -> None:
    starting = replace(SERVING, state=state)
    assert Polls().after(1000, starting) == ""
    polls = Polls()
    assert polls.after(int(START_SECONDS), starting, beats=False) == ""
    assert "has not run for 60 s" in polls.after(3, starting, beats=False)


def test_time_without_polls_does_not_count() -> None:
    """The launcher was stopped itself, or the machine slept."""
    polls = Polls()
    assert polls.after(5, replace(SERVING, live=1), beats=False) == ""
    polls.now += 3600.0
    assert polls.after(1, replace(SERVING, live=1), beats=False) == ""
