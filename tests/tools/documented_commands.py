"""Every shell command of README.md and docs/, and how it is checked.

python -m tests.tools.documented_commands    # prints the list

Commands are the lines of fenced blocks, and spans of code within sentences and tables that begin
with a program, where they may have placeholders: ``tgi serve [MODEL]``.

tests/system/test_documented_commands.py checks them, and fails for a command without a check.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

RUN, PARSED, FLAGS, TARGET, MODULE = "run", "parsed", "flags", "target", "module"
FILE, TEST, BY_HAND = "file", "test", "by hand"

_FENCE = re.compile(r"\s*(?:```|~~~)\s*([\w-]*)")
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_PIPE = re.compile(r"\s\|\s")
_SHELLS = frozenset(["sh", "bash", "shell", "console"])
_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=.*", re.DOTALL)
_OPERATORS = frozenset(["&&", "||", "|", "&", ";"])
_REDIRECTIONS = frozenset([">", ">>", "<", "2>"])

TGI = frozenset(
    [
        *("tgi", "text-generation-launcher", "text-generation-router"),
        *("text-generation-server", "text-generation-benchmark"),
    ]
)

NEEDS = {
    "pip": "a package index, and minutes",
    "uv": "uv and a package index",
    "pipx": "pipx and a package index",
    "docker": "Docker",
    "kubectl": "a cluster",
    "systemctl": "systemd as the first process",
    "numactl": "a machine with several NUMA nodes",
    "claude": "Claude Code; tests/system/test_agents.py runs it where it is installed",
    "codex": "Codex; tests/system/test_agents.py runs it where it is installed",
    "hf": "the Hugging Face hub",
    "npm": "npm's registry",
    "apt-get": "root, and Debian's packages",
    "promtool": "Prometheus' promtool",
    "git": "a repository",
    "install": "root",
    "chmod": "a file that another command of the block makes",
    "openssl": "a file that only root may write",
    "kill": "the id of a process; tests/system/test_restart.py sends signals",
    "source": "the installed environment",
    "export": "nothing: it sets a variable of the shell",
    "smg": "an environment with SMG; tests/system/test_smg.py makes one",
    "ray": "several machines; tests/system/test_ray.py starts a cluster on one",
    "sh": "Docker: the script is `tgi deploy docker`'s",
}
"""What commands need that are run by hand only, by program."""

TESTS = {
    "data:image/png;base64,...": "tests/system/test_images.py",
    "adapter_id": "tests/system/test_adapters.py",
    '"model": "sql"': "tests/system/test_adapters.py",
    "load_lora_adapter": "tests/system/test_adapters.py",
}
"""Requests that need another server than the shared one: a part of their text, and the test."""


@dataclass(frozen=True, slots=True)
class Check:
    """How a command is checked.

    Attributes:
        kind: ``run`` against a real server, ``parsed`` by tgi's commands, the ``flags`` of one
            with placeholders, a ``target`` of the Makefile, a ``module`` or a ``file`` that
            exists and has the flags, a named ``test``, or ``by hand``.
        detail: the module, the file, the test's file, or what the command needs.
    """

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command of a document.

    Attributes:
        file: the document, relative to the repository.
        line: on which it begins.
        text: as written, without its comment.
        words: without assignments of variables and redirections.
        variables: that are assigned in front of it.
        inline: whether it is within a sentence or a table, and may have placeholders.
    """

    file: str
    line: int
    text: str
    words: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict, compare=False)
    inline: bool = False

    @property
    def check(self) -> Check | None:
        """How it is checked, or None if no rule covers it."""
        program = self.words[0]
        if program in TGI:
            return Check(FLAGS if self.inline else PARSED)
        if program == "curl":
            return next((Check(TEST, t) for part, t in TESTS.items() if part in self.text), RUNS)
        if program == "make":
            return Check(TARGET)
        if program == "python" and self.words[1:2] == ("-m",):
            return Check(MODULE, self.words[2])
        if program == "pytest":
            return Check(FILE, self.words[1])
        if program in NEEDS:
            return Check(BY_HAND, NEEDS[program])
        return None


RUNS = Check(RUN)
_PROGRAMS = TGI | NEEDS.keys() | {"curl", "make", "python", "pytest"}


def documents() -> list[Path]:
    """The documents, README.md first."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> Iterator[Command]:
    """All commands of all documents."""
    for path in documents():
        file, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        yield from commands_of(file, text)
        yield from inline_commands_of(file, text)


def commands_of(file: str, text: str) -> Iterator[Command]:
    """The commands in the fenced blocks of a document.

    In a block of a shell, every line is a command, or its continuation; if some begin with ``$``,
    only these are, and the rest is output. In a block without a language, lines that begin with a
    known program are.
    """
    for language, begin, lines in _blocks(text):
        prompts = any(line.startswith("$ ") for line in lines)
        if language not in _SHELLS and language:
            continue
        number = 0
        while number < len(lines):
            line, first = lines[number], number
            number += 1
            if prompts and not line.startswith("$ "):
                continue
            line = line.removeprefix("$ ")
            if not prompts and not language and not _begins_with_program(line):
                continue
            while (line.endswith("\\") or not _is_complete(line)) and number < len(lines):
                line = line.removesuffix("\\") + "\n" * (not line.endswith("\\")) + lines[number]
                number += 1
            yield from _simple_commands(file, begin + first, line)


def inline_commands_of(file: str, text: str) -> Iterator[Command]:
    """The commands in a document's spans of code: a known program, and at least a word more."""
    fenced = {
        number for _, begin, lines in _blocks(text) for number in range(begin, begin + len(lines))
    }
    for number, line in enumerate(text.splitlines(), 1):
        if number in fenced:
            continue
        for span in _SPAN.findall(line):
            for part in _PIPE.split(span.replace("\\|", "|")):  # tables escape bars
                if not _begins_with_program(part):
                    continue
                words, variables = _without_assignments(shlex.split(part))
                if len(words) > 1:
                    yield Command(file, number, part, tuple(words), variables, inline=True)


def _blocks(text: str) -> Iterator[tuple[str, int, list[str]]]:
    """Language, number of the first line, and lines of every fenced block."""
    language: str | None = None
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if fence is None:
            lines.append(line)
        elif language is None:
            language, lines = fence[1], []
        else:
            yield language, number - len(lines), lines
            language = None


def _begins_with_program(line: str) -> bool:
    words = line.split()
    while words and _ASSIGNMENT.fullmatch(words[0]):
        words = words[1:]
    return bool(words) and words[0] in _PROGRAMS


def _is_complete(line: str) -> bool:
    try:
        shlex.split(line, comments=True)
    except ValueError:  # an open quote
        return False
    return True


def _simple_commands(file: str, number: int, line: str) -> Iterator[Command]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
    lexer.whitespace_split = True
    found: list[str] = []
    for word in [*lexer, ";"]:
        if word not in _OPERATORS:
            found.append(word)
            continue
        words, variables = _without_assignments(found)
        if words:
            yield Command(file, number, shlex.join(found), tuple(words), variables)
        found = []


def _without_assignments(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    rest, variables = list(words), {}
    while rest and _ASSIGNMENT.fullmatch(rest[0]):
        name, _, value = rest.pop(0).partition("=")
        variables[name] = value
    for index, word in enumerate(rest):
        if word in _REDIRECTIONS:
            return rest[:index], variables
    return rest, variables


def main() -> None:
    """Print every command with how it is checked."""
    counts: dict[str, int] = {}
    for command in commands():
        check = command.check
        kind = "UNCHECKED" if check is None else check.kind
        counts[kind] = counts.get(kind, 0) + 1
        where = f"{command.file}:{command.line}"
        print(f"{where}\n    {' '.join(command.text.split())}\n    -> {check or kind}")
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
