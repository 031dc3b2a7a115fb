"""With JSON logs whatever a child writes becomes JSON."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tgi_cli import logging as logs
from tgi_cli.errors import ShardError
from tgi_cli.launcher.child_process import ChildProcess

KEYS = {"timestamp", "level", "fields", "target", "role"}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("tgi_cli")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


def logged_by(script: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    logs.setup("launcher", json_output=True)
    child = ChildProcess(
        "model server", ShardError, [sys.executable, "-c", script], role="model-server"
    )
    child.wait()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert all(set(line) == KEYS for line in lines)
    return lines


def test_log_lines_are_forwarded_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    script = """
import logging, warnings
from tgi_cli import logging as logs
logs.setup("shard 1", json_output=True)
logging.getLogger("tgi_cli.worker").info("loaded", extra={"bytes": 7})
warnings.warn("old", DeprecationWarning)
"""
    loaded, warned = logged_by(script, capsys)
    assert loaded["role"] == "shard 1"
    assert loaded["fields"] == {"message": "loaded", "bytes": 7}
    assert warned["role"] == "shard 1"
    assert "DeprecationWarning: old" in warned["fields"]["message"]
    assert warned["target"] == "py.warnings"


def test_other_lines_become_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    script = r"""
import os
os.write(2, b'[W123 gloo.cpp:1] \xff odd\n\n{"timestamp": "half a li')
"""
    (line,) = logged_by(script, capsys)
    assert (line["role"], line["level"], line["target"]) == ("model-server", "WARNING", "stderr")
    assert line["fields"]["message"] == '[W123 gloo.cpp:1] � odd\n{"timestamp": "half a li'


def test_lines_keep_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    script = """
import logging, sys
from tgi_cli import logging as logs
logs.setup("model-server", json_output=True)
for number in range(3):
    logging.getLogger("tgi_cli").info("logged %d", number)
    print("printed", number, file=sys.stderr, flush=True)
"""
    messages = [line["fields"]["message"] for line in logged_by(script, capsys)]
    assert messages == ["logged 0", "printed 0", "logged 1", "printed 1", "logged 2", "printed 2"]


def test_crashes_become_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    script = """
import ctypes, threading
from tgi_cli import logging as logs
logs.setup("model-server", json_output=True)
logs.dump_on_signal()
thread = threading.Thread(target=lambda: 1 / 0, name="worker")
thread.start()
thread.join()
ctypes.string_at(0)
"""
    thread, crash = logged_by(script, capsys)
    assert thread["level"] == "CRITICAL"
    assert thread["fields"]["message"] == "in thread worker: division by zero"
    assert "ZeroDivisionError" in thread["fields"]["exception"]
    assert "Fatal Python error: Segmentation fault" in crash["fields"]["message"]
    assert "<string>" in crash["fields"]["message"], "where it was"
