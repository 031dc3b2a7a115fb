"""The log format of all processes: text lines, or one JSON object per line.

Logs go to stderr; stdout is for data. The level comes from ``--logger-level`` or LOG_LEVEL; color
depends on the terminal and NO_COLOR (https://no-color.org). Warnings and uncaught exceptions are
logged, too.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR")
MODEL_VARIABLE = "TGI_LOG_MODEL"
"""Environment variable with the model that processes name in each log line, since several models'
processes may share stderr."""

_TARGET = re.compile(r"[\w.:-]+")
_log = logging.getLogger(__name__)
_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "role"}
_ENCODER = json.JSONEncoder(ensure_ascii=False, default=str)
_COLOURS = {"DEBUG": "2", "INFO": "32", "WARNING": "33", "ERROR": "31", "CRITICAL": "31"}
_STDERR = 2
_CLEAR_LINE = "\r\x1b[K"


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    """The fields passed as ``extra=``; those of libraries that mark all records begin with _."""
    return {
        key: value
        for key, value in vars(record).items()
        if key not in _STANDARD and not key.startswith("_")
    }


class _JsonFormatter(logging.Formatter):
    """TGI's format (timestamp, level, fields, target), the role of the process, and its model."""

    def __init__(self, role: str, model: str = "") -> None:
        super().__init__()
        self.role = role
        self.model = model

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {"message": record.getMessage(), **_extras(record)}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        line = {
            "timestamp": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "fields": fields,
            "target": record.name,
            "role": getattr(record, "role", self.role),
        }
        if self.model:
            line["model"] = self.model
        return _ENCODER.encode(line)


class _LineFormatter(logging.Formatter):
    """Text lines.

    Args:
        start: Precedes each line.
    """

    def __init__(self, role: str, colour: bool, start: str = "", model: str = "") -> None:
        super().__init__()
        self.role = role
        self.model = model
        self._colour = colour
        self._start = start

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname:<7}"
        if self._colour:
            level = f"\x1b[{_COLOURS.get(record.levelname, '0')}m{level}\x1b[0m"
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        role = getattr(record, "role", self.role)
        model = f"{self.model} " if self.model else ""
        line = f"{self._start}{clock} {level} {model}{role}: {record.getMessage()}"
        extras = _extras(record)
        if extras:
            line += " " + " ".join(f"{key}={value}" for key, value in extras.items())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def parse_level(text: str) -> int:
    """Parse a level in TGI's spellings: ``info``, ``WARN``, or ``info,module=debug``.

    In a filter list, the first word without a target counts. Raises ValueError.
    """
    word = next((part for part in text.split(",") if "=" not in part), "info").strip().upper()
    word = {"WARN": "WARNING", "TRACE": "DEBUG", "FATAL": "ERROR"}.get(word, word)
    if word not in LEVELS:
        raise ValueError(f"unknown log level {text[:80]!r}; one of {', '.join(LEVELS).lower()}")
    return int(getattr(logging, word))


def parse_directives(text: str) -> dict[str, int]:
    """The levels of single targets in a filter list, by target.

    Raises ValueError for a part that is neither a level nor ``target=level``, and for a second
    level without a target.
    """
    found = {}
    bare = []
    for part in text.split(","):
        target, equals, word = (each.strip() for each in part.partition("="))
        if not equals:
            parse_level(target)
            bare.append(target)
        elif not _TARGET.fullmatch(target) or "=" in word:
            raise ValueError(f"{part.strip()[:80]!r} is not target=level")
        else:
            found[target] = parse_level(word)
    if len(bare) > 1:
        raise ValueError(f"{text[:80]!r} has {len(bare)} levels")
    return found


def setup(role: str, level: str = "INFO", json_output: bool = False) -> None:
    """Install this process's log handler, replacing any other. ``role`` names the process."""
    handler = logging.StreamHandler(sys.stderr)
    terminal = sys.stderr.isatty()
    # Another process may be drawing a progress bar on the line that the cursor is on.
    start = _CLEAR_LINE if terminal and os.environ.get("TERM", "dumb") != "dumb" else ""
    model = os.environ.get(MODEL_VARIABLE, "")
    lines = _LineFormatter(role, terminal and "NO_COLOR" not in os.environ, start, model)
    handler.setFormatter(_JsonFormatter(role, model) if json_output else lines)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tgi_cli").setLevel(parse_level(level))
    logging.captureWarnings(True)
    # Hooks of test runners and debuggers are not replaced.
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _uncaught
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _uncaught_in_thread


def json_line(level: str, message: str, target: str = "tgi", **fields: object) -> str:
    """Format a line of the JSON log without a logger.

    The role is that of the last :func:`setup`. Default: ``tgi``.
    """
    record = logging.LogRecord(target, getattr(logging, level), "", 0, message, None, None)
    vars(record).update(fields)
    formatters = [handler.formatter for handler in logging.getLogger().handlers]
    ours = [f for f in formatters if isinstance(f, (_JsonFormatter, _LineFormatter))]
    own = _JsonFormatter(ours[0].role, ours[0].model) if ours else _JsonFormatter("tgi")
    return own.format(record)


def is_log_line(line: bytes) -> bool:
    """Whether this is a complete line of another process's JSON log."""
    if not line.startswith(b'{"timestamp"'):
        return False
    try:
        json.loads(line)
    except ValueError:  # truncated when the process was killed
        return False
    return True


def pass_on(line: bytes) -> None:
    """Write a line of another process's log to our own, unchanged."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            # As with our own lines, a closed stream is not an error.
            with handler.lock or threading.RLock(), suppress(OSError, ValueError):
                handler.stream.write(line.decode() + "\n")
                handler.stream.flush()


def say_for(role: str, text: str) -> None:
    """Log a line that a process of this role wrote to stderr without the log format."""
    record = logging.LogRecord("stderr", logging.WARNING, "", 0, "%s", (text,), None)
    record.role = role
    for handler in logging.getLogger().handlers:
        handler.handle(record)


def dump_on_signal() -> None:
    """Write the stacks of all threads to stderr on SIGUSR1 and on crashes of the interpreter.

    They show where a process hangs, even within a library.
    https://docs.python.org/3/library/faulthandler.html
    """
    faulthandler.enable(_STDERR)
    faulthandler.register(signal.SIGUSR1, _STDERR, all_threads=True)


def _uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    _log.critical("%s: %s", kind.__name__, error, exc_info=(kind, error, traceback))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is SystemExit:
        return
    error = args.exc_value or args.exc_type()
    name = args.thread.name if args.thread is not None else "a thread"
    traceback = (args.exc_type, error, args.exc_traceback)
    _log.critical("in thread %s: %s", name, error, exc_info=traceback)
