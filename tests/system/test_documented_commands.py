"""Every shell command of README.md and docs/ is run, parsed, or known to need what is not here."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tools.documented_commands import (
    BY_HAND,
    FILE,
    FLAGS,
    MODULE,
    PARSED,
    ROOT,
    RUN,
    TARGET,
    TEST,
    Command,
    commands,
    commands_of,
    inline_commands_of,
)
from tests.tools.server_process import ServerProcess
from tgi_cli.cli import main, tgi_aliases
from tgi_cli.cli.commands import COMMANDS
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.config.settings import SETTINGS, settings_of
from tgi_cli.config.settings.setting import BENCH, COMPARE, ROUTER, SERVE, SERVER, VIEW
from tgi_cli.errors import ExitCode

_SERVER = re.compile(r"(?:http://)?(?:127\.0\.0\.1|localhost):(?:3000|8000|8080|11434)")
_PROGRAMS = {
    "tgi": main.run,
    "text-generation-launcher": tgi_aliases.launcher,
    "text-generation-router": tgi_aliases.router,
    "text-generation-server": tgi_aliases.server,
    "text-generation-benchmark": tgi_aliases.benchmark,
}
_OURS = {
    "text-generation-launcher": SERVE,
    "text-generation-router": ROUTER,
    "text-generation-benchmark": BENCH,
}
"""Our commands that programs of TGI run."""
_COMMON = frozenset(["--help", "--help-all", "--version", "--traceback", "-h", "-V"])
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


def test_modules_exist_and_have_the_flags() -> None:
    for command in commands():
        if command.check is None or command.check.kind != MODULE:
            continue
        spec = importlib.util.find_spec(command.words[2])
        assert spec is not None, command.text
        assert spec.origin is not None, command.text
        path = Path(spec.origin)
        sources = path.parent.glob("*.py") if path.name == "__init__.py" else [path]
        text = "".join(source.read_text(encoding="utf-8") for source in sources)
        for flag in flags_in(command.words[3:]):
            found = re.search(f'"(--)?{flag.lstrip("-")}"', text)
            assert found, f"{command.file}:{command.line}: {command.text}"


def flags_in(words: Sequence[str]) -> list[str]:
    """The flags among the words of a command, without values that are attached to them."""
    return [word.partition("=")[0] for word in words if re.match("--?[a-zA-Z]", word)]


def test_commands_within_sentences_have_flags_that_exist() -> None:
    names = {entry.name for entry in COMMANDS} | {VIEW, COMPARE}
    for command in commands():
        if command.check is None or command.check.kind != FLAGS:
            continue
        where = f"{command.file}:{command.line}: {command.text}"
        name = our_command(command)
        flags = {*_COMMON}
        if name is not None:
            assert name in names, where
            for setting in settings_of(SERVE if name == "env" else name):
                flags |= {*setting.flags}
        assert set(flags_in(command.words)) <= flags, where


def our_command(command: Command) -> str | None:
    """The command of ``tgi`` that a command line runs, or None for ``tgi`` itself."""
    program, *words = command.words
    named = [word for word in words if re.match("[a-z]", word)]
    if program == "text-generation-server" and named[:1] == ["serve"]:
        return SERVER
    name = " ".join(named[:2])
    return _OURS.get(program) or (name if name in (VIEW, COMPARE) else next(iter(named), None))


def test_named_files_exist() -> None:
    for command in commands():
        if command.check is not None and command.check.kind == FILE:
            assert (ROOT / command.check.detail).is_file(), command.text


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


def test_commands_are_found_within_sentences() -> None:
    text = """
Run `tgi serve [MODEL]`, not `tgi`, and `git diff \\| tgi chat -p "a b"`; `model`.
```
`make test`
```
"""
    found = [(c.line, c.words) for c in inline_commands_of("page.md", text)]
    assert found == [
        (2, ("tgi", "serve", "[MODEL]")),
        (2, ("git", "diff")),
        (2, ("tgi", "chat", "-p", "a b")),
    ]
