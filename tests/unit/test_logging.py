"""One log format for every process."""

from __future__ import annotations

import json
import logging as std_logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tgi_cli import logging


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = std_logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    std_logging.getLogger("tgi_cli").setLevel(std_logging.NOTSET)


def test_json_lines_carry_level_fields_target_and_role(capsys: pytest.CaptureFixture[str]) -> None:
    logging.setup("router", json_output=True)
    std_logging.getLogger("tgi_cli.router").info("served %d", 3, extra={"tokens": 7})
    line = json.loads(capsys.readouterr().err)
    assert line["level"] == "INFO"
    assert line["fields"] == {"message": "served 3", "tokens": 7}
    assert line["target"] == "tgi_cli.router"
    assert line["role"] == "router"
    assert line["timestamp"].endswith("Z")


def test_text_lines_on_stderr_have_no_color_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logging.setup("shard 0")
    std_logging.getLogger("tgi_cli.worker").warning("slow", extra={"ms": 12})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "WARNING shard 0: slow ms=12" in captured.err
    assert "\x1b" not in captured.err


def test_lines_name_the_model_where_there_are_several(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(logging.MODEL_VARIABLE, "org/first")
    logging.setup("router")
    std_logging.getLogger("tgi_cli.router").info("served")
    assert "INFO    org/first router: served" in capsys.readouterr().err
    logging.setup("router", json_output=True)
    std_logging.getLogger("tgi_cli.router").info("served")
    logging.say_for("model-server", "a library's line")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["role"], first["model"]) == ("router", "org/first")
    assert (second["role"], second["model"]) == ("model-server", "org/first")
    assert json.loads(logging.json_line("INFO", "ready"))["model"] == "org/first"


def test_a_line_clears_the_progress_bar_of_another_process() -> None:
    """Which leaves the cursor at the end of its line."""
    parent, child = pty.openpty()
    code = (
        "import logging, tgi_cli.logging as logs; logs.setup('router');"
        "logging.getLogger('tgi_cli').info('listening')"
    )
    for term, start in (("xterm", "\r\x1b[K"), ("dumb", "")):
        os.write(child, b"loading 40%")
        subprocess.run(
            [sys.executable, "-c", code],
            stderr=child,
            env={**os.environ, "TERM": term, "NO_COLOR": "1"},
            timeout=60,
            check=True,
        )
        shown = b""
        while b"listening" not in shown:
            shown += os.read(parent, 1000)
        _, _, line = shown.decode().partition("loading 40%")
        assert re.fullmatch(re.escape(start) + r"\d\d:\d\d:\d\d INFO .*listening\s*", line)
    os.close(parent)
    os.close(child)


def test_the_level_filters_messages(capsys: pytest.CaptureFixture[str]) -> None:
    logging.setup("x", level="warn")
    std_logging.getLogger("tgi_cli.x").info("no")
    std_logging.getLogger("tgi_cli.x").error("yes")
    assert "no" not in (err := capsys.readouterr().err)
    assert "yes" in err


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("info", std_logging.INFO),
        ("WARN", std_logging.WARNING),
        ("debug", std_logging.DEBUG),
        ("error,text_generation_router=debug", std_logging.ERROR),
        ("text_generation_router=debug", std_logging.INFO),
    ],
)
def test_tgis_spellings_of_levels_are_accepted(text: str, level: int) -> None:
    assert logging.parse_level(text) == level


def test_an_unknown_level_is_rejected() -> None:
    with pytest.raises(ValueError, match="loud"):
        logging.parse_level("loud")


def test_warnings_and_uncaught_exceptions_are_logged() -> None:
    script = """
import threading, warnings
from tgi_cli import logging
logging.setup("router", json_output=True)
warnings.warn("old")
thread = threading.Thread(target=lambda: {}["gone"], name="worker")
thread.start()
thread.join()
raise ValueError("nobody")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert all(set(line) == {"timestamp", "level", "fields", "target", "role"} for line in lines)
    assert {line["role"] for line in lines} == {"router"}
    warned, thread, last = (line["fields"] for line in lines)
    assert "UserWarning: old" in warned["message"]
    assert thread["message"] == "in thread worker: 'gone'"
    assert last["message"] == "ValueError: nobody"
    assert "Traceback" in last["exception"]


def test_a_line_without_a_logger_has_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    logging.setup("launcher", json_output=True)
    std_logging.getLogger("tgi_cli").error("said")
    logged = json.loads(capsys.readouterr().err)
    line = json.loads(logging.json_line("ERROR", "said", remedy="do"))
    assert set(line) == set(logged)
    assert (line["level"], line["role"], line["target"]) == ("ERROR", "launcher", "tgi")
    assert line["fields"] == {"message": "said", "remedy": "do"}


def test_hooks_of_others_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = lambda *_: None  # noqa: E731
    monkeypatch.setattr(sys, "excepthook", mine)
    logging.setup("x")
    assert sys.excepthook is mine
