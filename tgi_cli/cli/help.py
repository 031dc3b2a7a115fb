"""The texts of ``--help`` and ``--help-all``, from the table of settings.

They are plain text laid out for the width of the terminal; only headings have a color.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

from tgi_cli.config.settings.setting import Setting
from tgi_cli.process.terminal import FALLBACK, terminal_width

MAX_LINES = 60
"""Lines of ``--help`` at 80 columns: a command with more shows its common flags only."""

_SHARE = 0.44
"""Share of the width that the left column may take; longer flags have a line of their own."""
_GAP = 2

Example = tuple[str, str]
"""A command line and what it does."""


@dataclass(frozen=True, slots=True)
class ProgramHelp:
    """A program of TGI's name that runs one of our commands.

    Attributes:
        name: its name, with its own subcommand if it has any.
        about: replaces the command's description.
    """

    name: str
    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandHelp:
    """What the help of a command consists of.

    Attributes:
        path: the command as it is called: ``tgi serve``.
        about: the description, in paragraphs.
        settings: all settings that the command takes.
        several: whether its argument may be repeated.
        examples: command lines to start with.
        defaults: words that override the defaults of the table, by name.
        notes: what applies to all flags.
    """

    path: str
    about: str
    settings: Sequence[Setting]
    several: bool = False
    examples: Sequence[Example] = ()
    defaults: Mapping[str, Any]
    notes: str = ""

    def text(self, *, everything: bool = False) -> str:
        """The page for the terminal's width, with every flag or with the common ones.

        A command whose flags all fit into ``MAX_LINES`` lines has one page.
        """
        whole = everything or len(self._lines(FALLBACK, True)) <= MAX_LINES
        return "\n".join(self._lines(terminal_width(), whole))

    def _lines(self, width: int, whole: bool) -> list[str]:
        visible = [setting for setting in self.settings if not setting.hidden]
        flags = [setting for setting in visible if not setting.argument]
        shown = [setting for setting in flags if whole or setting.brief]
        arguments = [setting for setting in visible if setting.argument]
        first, *rest = paragraphs(self.about) or [""]
        lines = [*wrapped(first, width), ""]
        lines += [f"{heading('Usage:')} {self.path} {_usage(arguments, self.several)}[FLAGS]"]
        for text in rest:
            lines += ["", *wrapped(text, width)]
        if self.examples:
            lines += ["", heading("Examples:"), *_examples(self.examples, width)]
        groups = [(name, [*group]) for name, group in groupby(shown, attrgetter("panel"))]
        rows = [("Arguments", [self._argument(setting, whole) for setting in arguments])]
        rows += [
            (name, [self._flag(setting, whole) for setting in group]) for name, group in groups
        ]
        rows += [("Help", _help_rows(self.path, len(flags) - len(shown)))]
        column = left_column([row for _, group in rows for row in group], width)
        for name, group in rows:
            if group:
                # Only their headings separate the groups of the short page.
                lines += [""] if whole or name == "Arguments" else []
                lines += [heading(f"{name}:"), *table(group, width, column)]
        if self.notes:
            lines += ["", *wrapped(self.notes, width)]
        return lines

    def _argument(self, setting: Setting, whole: bool) -> tuple[str, str]:
        return setting.kind.metavar, self._meaning(setting, whole)

    def _flag(self, setting: Setting, whole: bool) -> tuple[str, str]:
        name = f"-{setting.short}, " if setting.short else "    "
        if setting.negative is True:
            name += f"--[no-]{setting.flag[2:]}"
        elif setting.negative:
            name += f"{setting.flag}, {setting.negative}"
        else:
            name += setting.flag
        metavar = f" {setting.kind.metavar}" if setting.kind.metavar else ""
        return name + metavar, self._meaning(setting, whole)

    def _meaning(self, setting: Setting, whole: bool) -> str:
        source = setting.help if whole else setting.brief or setting.help
        text, stated, _ = source.partition(" Default: ")
        if (word := self._overridden(setting)) is not None:
            return f"{text} Default: {word}."
        if stated:
            return source
        value = setting.default
        if value in (None, (), "") or value is False:
            return text
        shown = "on" if value is True else f"{value:g}" if isinstance(value, float) else value
        return f"{text} Default: {shown}."

    def _overridden(self, setting: Setting) -> Any:
        """The default under this or another name of the setting."""
        same = setting.alias_of or setting.name
        names = [other.name for other in self.settings if same in (other.name, other.alias_of)]
        return next((self.defaults[name] for name in names if name in self.defaults), None)


def command_list(about: str, groups: Mapping[str, Sequence[tuple[str, str]]]) -> str:
    """The help of ``tgi`` itself: its commands by group, with their descriptions."""
    width = terminal_width()
    flags = [
        ("-V, --version", "Print the version."),
        ("    --traceback", "Print the traceback of an error. Variable: TGI_TRACEBACK."),
        ("-h, --help", "Show this help; after a command, the command's."),
    ]
    column = left_column([*flags, *(row for rows in groups.values() for row in rows)], width)
    lines = [*wrapped(about, width), "", f"{heading('Usage:')} tgi COMMAND [FLAGS]"]
    lines += ["", heading("Examples:"), *_examples(_FIRST_STEPS, width)]
    for name, rows in groups.items():
        lines += ["", heading(f"{name}:"), *table(rows, width, column)]
    lines += ["", heading("Flags:"), *table(flags, width, column)]
    return "\n".join(lines)


_FIRST_STEPS = (
    ("tgi serve", "serve the bundled miniature model on port 3000"),
    ("tgi serve Qwen/Qwen3-0.6B", "serve a model of the Hugging Face hub"),
    ("tgi chat Qwen/Qwen3-0.6B", "chat with it in the terminal"),
    ("tgi bench", "measure the bundled model"),
    ("tgi serve --help", "the common flags of a command; --help-all: all"),
)


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a docstring, each in one line."""
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most ``width`` columns; words are never divided."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def heading(text: str) -> str:
    """A heading, in bold on a terminal."""
    colors = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return f"\x1b[1m{text}\x1b[0m" if colors else text


def left_column(rows: Iterable[tuple[str, str]], width: int) -> int:
    """The column where the right cells of rows begin."""
    most = max(int(width * _SHARE), 12)
    lengths = [len(left) + 2 * _GAP for left, _ in rows]
    return max((length for length in lengths if length <= most), default=most)


def table(rows: Iterable[tuple[str, str]], width: int, column: int) -> Iterator[str]:
    """Rows of two cells as lines; a left cell that is too long has a line of its own."""
    for left, right in rows:
        lines = wrapped(right, max(width - column, 20))
        if len(left) + 2 * _GAP > column:
            yield f"{' ' * _GAP}{left}"
        else:
            yield f"{' ' * _GAP}{left:<{column - _GAP}}{lines.pop(0) if lines else ''}".rstrip()
        yield from (f"{' ' * column}{line}" for line in lines)


def _examples(examples: Sequence[Example], width: int) -> Iterator[str]:
    """Command lines with comments after them, or above them where that is too wide."""
    longest = max(len(line) for line, _ in examples)
    beside = _GAP + longest + _GAP + max(len(meaning) + 2 for _, meaning in examples) <= width
    for line, meaning in examples:
        if beside:
            yield f"{' ' * _GAP}{line:<{longest + _GAP}}# {meaning}"
        else:
            yield f"{' ' * _GAP}# {meaning}"
            yield f"{' ' * _GAP}{line}"


def _usage(arguments: Sequence[Setting], several: bool) -> str:
    words = [s.kind.metavar if s.required else f"[{s.kind.metavar}]" for s in arguments]
    if several:
        words[-1] += "..."
    return "".join(f"{word} " for word in words)


def _help_rows(path: str, left_out: int) -> list[tuple[str, str]]:
    rows = [("-h, --help", "Show this help.")]
    if left_out:
        rows.append(("    --help-all", f"Show all flags of {path}: {left_out} more."))
    return rows
