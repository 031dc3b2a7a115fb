"""Every shell command of README.md and docs/ is run, parsed, or known to need what is not here."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.tools.documented_commands import (
    BY_HAND,
    MODULE,
    PARSED,
    ROOT,
    RUN,
    TARGET,
    TEST,
    Command,
    commands,
    commands_of,
)
from tests.tools.server_process import ServerProcess
from tgi_cli.cli import main, tgi_aliases
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.config.settings import SETTINGS
from tgi_cli.errors import ExitCode

_SERVER = re.compile(r"(?:http://)?(?:127\.0\.0\.1|localhost):(?:3000|8000|8080|11434)")
_PROGRAMS = {
    "tgi": main.run,
    "text-generation-launcher": tgi_aliases.launcher,
    "text-generation-router": tgi_aliases.router,
    "text-generation-server": tgi_aliases.server,
    "text-generation-benchmark": tgi_aliases.benchmark,
}
_FILES = {"server.yaml": "max-total-tokens: 4096\n"}
"""Files that parsing reads."""


def _checked(*kinds: str) -> Any:
    """A decorator: one case for each command that is checked in one of these ways."""
    found = [c for c in commands() if c.check is not None and c.check.kind in kinds]
    names = [f"{c.file}:{c.line}:{c.words[0]}" for c in found]
    return pytest.mark.parametrize("command", found, ids=names)


class _ParsedError(BaseException):
    """Ends a command when its settings are parsed; no handler of the command catches it."""


def test_every_command_has_a_check() -> None:
    unknown = [f"{c.file}:{c.line}: {c.text}" for c in commands() if c.check is None]
    assert not unknown, "\n".join(unknown)


def test_named_tests_exist() -> None:
    for command in commands():
        check = command.check
        if check is not None and check.kind in (TEST, BY_HAND):
            for name in re.findall(r"tests/[\w/]+\.py", check.detail):
                assert (ROOT / name).is_file(), name


@_checked(PARSED)
def test_commands_of_tgi_are_valid(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for setting in SETTINGS:
        for name in setting.all_variables:
            monkeypatch.delenv(name, raising=False)
    for name, value in command.variables.items():
        monkeypatch.setenv(name, value)
    for name, text in _FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    read = ParsedSettings.read

    def read_only(*arguments: Any) -> ParsedSettings:
        read(*arguments)
        raise _ParsedError

    monkeypatch.setattr(ParsedSettings, "read", read_only)
    program, *words = command.words
    with contextlib.suppress(_ParsedError):
        assert _PROGRAMS[program](words) == ExitCode.OK, command.text  # --version and the like


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
@_checked(RUN)
def test_requests_are_answered(command: Command, server: ServerProcess) -> None:
    words = [_SERVER.sub(server.url, word) for word in command.words[1:]]
    done = subprocess.run(
        ["curl", "--fail-with-body", "--max-time", "60", *words],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, (command.text, done.stdout, done.stderr)
    assert done.stdout


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
@_checked(TARGET)
def test_targets_exist(command: Command) -> None:
    subprocess.run(
        ["make", "--dry-run", "--always-make", *command.words[1:]],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=60,
    )


@_checked(MODULE)
def test_modules_exist(command: Command) -> None:
    assert importlib.util.find_spec(command.words[2]) is not None, command.text


def test_commands_are_found_in_blocks() -> None:
    text = """
```
$ tgi serve \\
    --port 0   # a comment
output: tgi serve
```
```sh
A=1 tgi env | head > FILE && curl 'http://a/?b
c' &
```
```
make test
  diagram
```
```python
tgi serve
```
"""
    found = [(c.line, c.words, c.variables) for c in commands_of("page.md", text)]
    assert found == [
        (3, ("tgi", "serve", "--port", "0"), {}),
        (8, ("tgi", "env"), {"A": "1"}),
        (8, ("head",), {}),
        (8, ("curl", "http://a/?b\nc"), {}),
        (12, ("make", "test"), {}),
    ]
