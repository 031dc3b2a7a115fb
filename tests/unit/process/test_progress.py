"""Progress of long tasks: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time

import pytest

from tests.tools.terminal import Emulator
from tgi_cli.process import progress
from tgi_cli.process.progress import ProgressReporter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Not a fixture: capturing replaces stderr between the setup and the test."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    return screen


def test_a_line_shows_bytes_note_speed_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 110.0, 120.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    reporter = ProgressReporter(log_interval=None)
    reporter.start("org/m", total=10_000_000_000, completed=2_000_000_000)
    reporter.advance(1_000_000_000, note="1 of 4 files")
    assert reporter.line() == (
        "org/m: 3.0 GB of 10.0 GB (30%), 1 of 4 files, 100.0 MB/s, 1m 10s left"
    )
    reporter.advance(-1_000_000_000)
    assert reporter.line() == "org/m: 2.0 GB of 10.0 GB (20%), 1 of 4 files, 0 B/s, waiting"


def test_a_line_of_another_unit_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    reporter = ProgressReporter("blocks", log_interval=None)
    reporter.start("GPTQ", total=24)
    reporter.update(2.5)
    assert reporter.line() == "GPTQ: 2.5 of 24 blocks (10%), 1m 26s left"


def test_lines_are_logged_at_every_interval_until_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with ProgressReporter(log_interval=0.001) as reporter:
        reporter.start("org/m", total=10)
        end = time.monotonic() + 10
        while len(caplog.records) < 2 and time.monotonic() < end:
            time.sleep(0.001)
    reporter.stop()
    assert "progress" not in {thread.name for thread in threading.enumerate()}
    assert len(caplog.records) >= 2
    assert all("org/m: 0 B of 10 B (0%)" in record.message for record in caplog.records)


def test_the_bar_and_the_log_do_not_tear_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = use_terminal(monkeypatch)
    handler = logging.StreamHandler()
    # Without handlers of earlier tests, which would print the record, too.
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    reporter = ProgressReporter()
    reporter.start("org/m", total=2_000_000, completed=500_000)
    assert handler.stream is not terminal
    logging.getLogger().warning("in between")
    reporter.advance(1_500_000, note="1/2 files")
    reporter.stop()
    reporter.stop()
    assert handler.stream is terminal
    emulator = Emulator(columns=120)
    emulator.feed(terminal.getvalue().replace("\n", "\r\n").encode())
    record, bar = emulator.shown()
    assert record == "in between"
    assert bar.startswith("org/m ")
    assert "2.0/2.0 MB" in bar
    assert bar.endswith("1/2 files")


def test_a_new_task_replaces_the_previous_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = use_terminal(monkeypatch)
    with ProgressReporter("blocks") as reporter:
        reporter.start("measuring", total=4)
        reporter.update(4)
        reporter.start("writing", total=3)
        reporter.update(3)
    last = terminal.getvalue().rsplit("\r", 1)[-1]
    assert "writing" in last
    assert "3/3" in last
    assert "measuring" not in last


def test_nothing_is_drawn_before_the_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = use_terminal(monkeypatch)
    with ProgressReporter(delay=60.0) as reporter:
        reporter.start("loading weights", total=10)
        reporter.update(10)
    assert terminal.getvalue() == ""
