"""Help: what its pages show, in which width, and in the name of which program."""

from __future__ import annotations

import os
import pty
import re
import shlex
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from fcntl import ioctl
from termios import TIOCSWINSZ
from typing import Any

import pytest

from tgi_cli.cli import main, tgi_aliases
from tgi_cli.cli.commands import COMMANDS
from tgi_cli.cli.help import MAX_LINES
from tgi_cli.config.settings import settings_of
from tgi_cli.config.settings.setting import BENCH, COMPARE, SERVE, VIEW
from tgi_cli.errors import ExitCode

PATHS = [*([entry.name] for entry in COMMANDS), ["bench", "view"], ["bench", "compare"]]
"""Commands as they are called."""


def page(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *words: str,
    width: int = 80,
) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main.run([*words]) == ExitCode.OK
    return capsys.readouterr().out


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_fits_a_screenful_and_its_width(
    path: Sequence[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for flag, most in (("--help", MAX_LINES), ("--help-all", 1000)):
        for width in (80, 140):
            text = page(capsys, monkeypatch, *path, flag, width=width)
            assert "<bool>" not in text
            lines = text.splitlines()
            assert len(lines) <= most
            assert max(map(len, lines)) <= width


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_all_has_every_flag_and_help_says_how_many_it_leaves_out(
    path: Sequence[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = SERVE if path == ["env"] else " ".join(path)
    flags = {s.flag for s in settings_of(name) if not (s.hidden or s.argument)}
    whole = page(capsys, monkeypatch, *path, "--help-all").replace("[no-]", "")
    shown = set(re.findall(r"^ {2}(?:-\w, | {4})(--[a-z-]+)", whole, re.MULTILINE))
    assert shown == flags | {"--help"}
    text = page(capsys, monkeypatch, *path, "--help").replace("[no-]", "")
    common = set(re.findall(r"^ {2}(?:-\w, | {4})(--[a-z-]+)", text, re.MULTILINE))
    left_out = re.search(r"--help-all +Show all flags of [\w -]+: (\d+) more", text)
    assert len(flags - common) == (int(left_out[1]) if left_out else 0)


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_examples_have_flags_that_exist_and_fit_beside_their_comments(
    path: Sequence[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = page(capsys, monkeypatch, *path, "--help")
    examples = text.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert examples, "a command without examples"
    for line in examples:
        command, comment, _ = line.partition("  # ")
        assert command.strip(), line
        assert comment, line
        words = shlex.split(command)
        words = words[words.index("tgi") + 1 :]
        name = " ".join(words[: 2 if words[:2] in ([*VIEW.split()], [*COMPARE.split()]) else 1])
        known = {
            flag
            for setting in settings_of(SERVE if name == "env" else name)
            for flag in setting.flags
        }
        assert {word for word in words if word.startswith("-")} <= known, line


def test_the_width_of_the_terminal_is_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide, narrow = (
        page(capsys, monkeypatch, "serve", "--help-all", width=width).splitlines()
        for width in (140, 80)
    )
    assert max(map(len, wide)) > 120
    assert len(wide) < len(narrow)


def test_the_width_is_that_of_the_terminal_behind_a_pager() -> None:
    """Stdout is a pipe, stderr the terminal."""
    parent, child = pty.openpty()
    ioctl(child, TIOCSWINSZ, struct.pack("HHHH", 45, 132, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-m", "tgi_cli", "serve", "--help-all"],
        stdout=subprocess.PIPE,
        stderr=child,
        stdin=subprocess.DEVNULL,
        env=environment,
        text=True,
        timeout=60,
        check=True,
    )
    os.close(child)
    os.close(parent)
    assert 110 < max(map(len, done.stdout.splitlines())) <= 132
    assert "\x1b[" not in done.stdout


def test_the_list_of_commands_has_groups_and_a_line_for_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = page(capsys, monkeypatch, "--help").splitlines()
    assert len(lines) <= MAX_LINES
    for entry in COMMANDS:
        line = next(line for line in lines if line.startswith(f"  {entry.name} "))
        assert line.endswith(entry.help), "one line at 80 columns"
    assert [line for line in lines if line.endswith(":")][:3] == ["Examples:", "Serve:", "Prepare:"]


@pytest.mark.parametrize(
    ("program", "name", "default", "absent"),
    [
        (tgi_aliases.launcher, "text-generation-launcher", "bigscience/bloom-560m", "bundled"),
        (tgi_aliases.router, "text-generation-router", "bigscience/bloom", "bundled"),
        (tgi_aliases.benchmark, "text-generation-benchmark", "10", "bloom"),
    ],
)
def test_programs_of_tgi_have_help_of_their_own(
    program: Callable[[list[str]], int],
    name: str,
    default: str,
    absent: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for flag in ("--help", "--help-all"):
        assert program([flag]) == ExitCode.OK
        text = " ".join(capsys.readouterr().out.split())
        assert f"Usage: {name} " in text
        assert f"Default: {default}." in text
        assert absent not in text
    assert program(["--no-such-flag"]) == ExitCode.USAGE
    assert f"see {name} --help" in capsys.readouterr().err


def test_subcommands_of_the_server_have_help_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["serve"], ["download-weights"], ["quantize"]):
        assert tgi_aliases.server([*words, "--help"]) == ExitCode.OK
        assert f"Usage: text-generation-server {words[0]} " in capsys.readouterr().out


def test_help_shows_flags_of_its_own_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: Any = {setting.name for setting in settings_of(BENCH)}
    assert "--fail-on" not in page(capsys, monkeypatch, "bench", "--help-all")
    assert "--fail-on" in page(capsys, monkeypatch, "bench", "compare", "--help")
    assert "fail_on" not in settings
