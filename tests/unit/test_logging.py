"""One log format for every process."""

from __future__ import annotations

import json
import logging as std_logging
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


def test_human_lines_go_to_stderr_without_colour_off_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logging.setup("shard 0")
    std_logging.getLogger("tgi_cli.worker").warning("slow", extra={"ms": 12})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "WARNING shard 0: slow ms=12" in captured.err
    assert "\x1b" not in captured.err


def test_the_level_bounds_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_tgi_spellings_of_levels(text: str, level: int) -> None:
    assert logging.parse_level(text) == level


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="loud"):
        logging.parse_level("loud")
