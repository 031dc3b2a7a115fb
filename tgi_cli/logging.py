"""One log format for every process: human lines, or one JSON object a line.

Logs go to stderr; stdout is for data. The level comes from ``--logger-level`` or LOG_LEVEL,
colour follows the terminal and NO_COLOR (https://no-color.org).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any

LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR")

_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_ENCODER = json.JSONEncoder(ensure_ascii=False, default=str)
_COLOURS = {"DEBUG": "2", "INFO": "32", "WARNING": "33", "ERROR": "31", "CRITICAL": "31"}


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    """The fields that a call gave through ``extra=``."""
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class _JsonFormatter(logging.Formatter):
    """TGI's shape: timestamp, level, fields, target; plus the role of the process."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

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
            "role": self._role,
        }
        return _ENCODER.encode(line)


class _LineFormatter(logging.Formatter):
    def __init__(self, role: str, colour: bool) -> None:
        super().__init__()
        self._role = role
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname:<7}"
        if self._colour:
            level = f"\x1b[{_COLOURS.get(record.levelname, '0')}m{level}\x1b[0m"
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {level} {self._role}: {record.getMessage()}"
        extras = _extras(record)
        if extras:
            line += " " + " ".join(f"{key}={value}" for key, value in extras.items())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def parse_level(text: str) -> int:
    """The numeric level of TGI's spellings: ``info``, ``WARN``, or ``info,module=debug``.

    Of a filter list the first bare word counts. Raises ValueError on anything else.
    """
    word = next((part for part in text.split(",") if "=" not in part), "info").strip().upper()
    word = {"WARN": "WARNING", "TRACE": "DEBUG", "FATAL": "ERROR"}.get(word, word)
    if word not in LEVELS:
        raise ValueError(f"unknown log level {text!r}; one of {', '.join(LEVELS).lower()}")
    return int(getattr(logging, word))


def setup(role: str, level: str = "INFO", json_output: bool = False) -> None:
    """Install the handler of this process; the last call wins. ``role`` names the process."""
    handler = logging.StreamHandler(sys.stderr)
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    handler.setFormatter(_JsonFormatter(role) if json_output else _LineFormatter(role, colour))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tgi_cli").setLevel(parse_level(level))
