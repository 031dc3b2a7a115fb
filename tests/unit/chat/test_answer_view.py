"""What is on the screen while an answer arrives, and when it is complete."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from rich.segment import Segment

from tests.tools.terminal import Emulator
from tgi_cli.chat.answer_view import PlainAnswer, TerminalAnswer
from tgi_cli.chat.live_region import LiveRegion
from tgi_cli.chat.reasoning_tags import SplitText
from tgi_cli.chat.stream_parser import AnswerPart


class Screen(io.StringIO):
    """A terminal that a console writes to.

    Attributes:
        emulator: what it shows.
    """

    encoding = "utf-8"  # type: ignore[assignment]

    def __init__(self, columns: int, lines: int) -> None:
        super().__init__()
        self.emulator = Emulator(columns, lines)
        self.console = Console(
            file=self, force_terminal=True, width=columns, height=lines, highlight=False
        )
        self.view = TerminalAnswer(self.console)

    def write(self, text: str) -> int:
        self.emulator.feed(text.replace("\n", "\r\n").encode())
        return len(text)

    def content(self, text: str) -> None:
        self.view.add(AnswerPart(content=text), SplitText(content=text))
        self.draw()

    def reasoning(self, text: str) -> None:
        self.view.add(AnswerPart(reasoning=text), SplitText())
        self.draw()

    def draw(self) -> None:
        """Redraw whatever the time."""
        self.view._drawn_at = float("-inf")
        self.view.refresh()

    def resize(self, columns: int) -> None:
        self.emulator.screen.resize(None, columns)
        self.console.width = columns

    def shown(self) -> list[str]:
        return self.emulator.shown()

    def everything(self) -> list[str]:
        return self.emulator.everything()


def arrives(screen: Screen, text: str, size: int = 3) -> None:
    for start in range(0, len(text), size):
        screen.content(text[start : start + size])


WORDS = " ".join(f"word{number}" for number in range(60))


def test_markdown_as_it_comes() -> None:
    screen = Screen(40, 12)
    screen.content("# Title\n\nSome **bo")
    assert screen.shown() == ["Title", "", "Some **bo"]
    screen.content("ld** text\n\n- one\n- tw")
    assert screen.shown() == ["Title", "", "Some bold text", "", " • one", " • tw"]
    screen.content("o\n\n```python\nprint(1)")
    assert screen.shown()[-3:] == [" • two", "", "  print(1)"]
    screen.content("\n```\n")
    screen.view.finish()
    assert screen.shown()[-1] == "  print(1)"
    assert not screen.emulator.screen.cursor.hidden
    assert screen.emulator.screen.cursor.x == 0


@pytest.mark.parametrize(("size", "lines"), [(11, 6), (40, 10), (200, 40)])
def test_all_of_a_long_answer_is_there_once(size: int, lines: int) -> None:
    code = "\n".join(f"line_{number} = {number}" for number in range(30))
    items = "\n".join(f"{number}. item {number}" for number in range(1, 31))
    screen = Screen(30, lines)
    arrives(screen, f"{WORDS}\n\n```python\n{code}\n```\n\n{items}\n\nThe end.", size)
    screen.view.finish()
    everything = screen.everything()
    assert " ".join(everything).split()[:60] == WORDS.split()
    assert [line for line in everything if "line_" in line] == [
        f"  line_{number} = {number}" for number in range(30)
    ]
    assert [line.split()[0] for line in everything if "item" in line] == [
        str(number) for number in range(1, 31)
    ]
    assert everything[-1] == "The end."


def test_rows_of_a_table_change_the_columns_before_them() -> None:
    screen = Screen(40, 8)
    rows = "\n".join(f"| {'x' * number} | {number} |" for number in range(1, 13))
    arrives(screen, f"| a | b |\n|---|---|\n{rows}\n\nafter", 5)
    screen.view.finish()
    everything = screen.everything()
    assert len([line for line in everything if line.startswith(" x")]) == 12
    assert len({line.split()[1] for line in everything if line.startswith(" x")}) == 12
    assert len({line.rstrip().rfind(" ") for line in everything if line.startswith(" x")}) == 1


def test_a_terminal_that_becomes_wider_loses_no_word() -> None:
    screen = Screen(40, 8)
    arrives(screen, f"# Title\n\n{WORDS[:200]}", 20)
    screen.resize(60)
    arrives(screen, WORDS[200:], 20)
    screen.view.finish()
    seen = " ".join(screen.everything()).split()
    assert [word for word in seen if seen.count(word) == 1] != []
    assert set(WORDS.split()) <= set(seen)
    assert len(seen) < 75, "and repeats at most a line"


@pytest.mark.parametrize(("variables", "rows"), [({}, 3), ({"XTERM_VERSION": "1"}, 1)])
def test_lines_that_a_narrower_terminal_wraps_are_erased(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], rows: int
) -> None:
    for name in ("XTERM_VERSION", "TMUX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=40, height=10)
    region = LiveRegion(console)
    region.draw([[Segment("x" * 40)], [Segment("y" * 30)]])
    console.width = 25
    file.truncate(0)
    region.draw([])
    assert f"\r\x1b[{rows}A\x1b[J" in file.getvalue()


def test_reasoning_is_folded() -> None:
    screen = Screen(40, 12)
    screen.draw()
    assert "s" in screen.shown()[0], "the clock of the wait"
    screen.reasoning("First this. " * 20)
    shown = screen.shown()
    assert " thinking " in shown[0]
    assert len(shown) == 5
    screen.content("\n\nThe answer.")
    shown = screen.shown()
    assert shown[0].startswith("thought for ")
    assert shown[1:] == ["", "The answer."]
    screen.reasoning("Once more.")
    assert screen.shown()[2:4] == ["The answer.", screen.shown()[3]]
    assert " thinking " in screen.shown()[3]
    screen.content("Done.")
    screen.view.finish()
    assert screen.shown()[2] == "The answer."
    assert screen.shown()[-1] == "Done."


def test_reasoning_that_is_known_by_its_end() -> None:
    screen = Screen(40, 12)
    screen.content("Let me see.")
    screen.view.add(AnswerPart(), SplitText(content="Yes.", was_reasoning=True))
    screen.draw()
    shown = screen.shown()
    assert shown[0].startswith("thought for ")
    assert shown[1:] == ["", "Yes."]


def test_notices_stay() -> None:
    screen = Screen(40, 12)
    screen.view.notice("the server is busy")
    screen.content("Hello.")
    screen.view.finish()
    assert screen.shown() == ["the server is busy", "Hello."]


def test_no_answer_leaves_nothing() -> None:
    screen = Screen(40, 12)
    screen.draw()
    screen.view.finish()
    assert screen.shown() == []
    assert not screen.emulator.screen.cursor.hidden


def test_a_dumb_terminal_gets_plain_text() -> None:
    file = io.StringIO()
    view = PlainAnswer(Console(file=file))
    parts: list[dict[str, Any]] = [{"reasoning": "hm"}, {"reasoning": "m"}]
    for part in parts:
        view.add(AnswerPart(**part), SplitText())
    for text in ("\n\n**He", "llo**\x1b[31m"):
        view.add(AnswerPart(content=text), SplitText(content=text))
        view.refresh()
    view.finish()
    assert file.getvalue() == "(thinking)\n**Hello**[31m\n"
