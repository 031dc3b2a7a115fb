"""What is shown while a download runs."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from tgi_cli.hub import LineProgress, Progress, TerminalProgress, pick_progress, progress


def test_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 110.0, 120.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    lines = LineProgress(interval=3600)
    lines.start("org/m", total=10_000_000_000, already=2_000_000_000, files=4)
    lines.advance(1_000_000_000)
    lines.file_done("a")
    assert lines.line() == ("org/m: 3.0 GB of 10.0 GB (30%), 1 of 4 files, 100.0 MB/s, 1m 10s left")
    lines.advance(-1_000_000_000)
    assert lines.line() == "org/m: 2.0 GB of 10.0 GB (20%), 1 of 4 files, 0 B/s, waiting"
    lines.finish()
    lines.finish()


def test_a_line_comes_at_every_interval(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lines = LineProgress(interval=0.001)
    lines.start("org/m", total=10, already=0, files=1)
    thread = lines._thread
    assert thread is not None
    while len(caplog.records) < 2 and thread.is_alive():
        thread.join(0.01)
    lines.finish()
    assert not thread.is_alive()
    assert all("org/m: 0 B of 10 B (0%)" in record.message for record in caplog.records)


def test_the_terminals_bar_and_the_log_do_not_tear_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    try:
        bar = pick_progress()
        assert isinstance(bar, TerminalProgress)
        bar.start("org/m", total=2_000_000, already=500_000, files=2)
        assert handler.stream is not screen
        logging.getLogger().warning("in between")
        bar.advance(1_500_000)
        bar.file_done("a")
        bar.finish()
        bar.finish()
        assert handler.stream is screen
    finally:
        logging.getLogger().removeHandler(handler)
    shown = screen.getvalue()
    assert "in between\n" in shown.replace("\r", "")
    assert "2.0/2.0 MB" in shown
    assert "1/2 files" in shown


def test_the_right_one_is_picked() -> None:
    assert type(pick_progress(quiet=True)) is Progress
    assert type(pick_progress(json_output=True)) is LineProgress
    assert type(pick_progress()) is LineProgress  # under pytest stderr is no terminal


def test_libraries_that_want_tqdm_feed_the_same_bytes() -> None:
    class Sum(Progress):
        total = 0

        def advance(self, count: int) -> None:
            self.total += count

    mine = Sum()
    with mine.as_tqdm()(total=100, desc="x", unit="B", initial=0) as bar:
        bar.update(30)
        bar.update_transfer(25)
        bar.update(70)
    assert mine.total == 100
