"""Markdown on a terminal: the settled blocks of a text that still grows, and how they look."""

from __future__ import annotations

import re
from dataclasses import dataclass

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.segment import Segment
from rich.syntax import Syntax

# HTML would be dropped, as would be definitions of links; models write both as text.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
_PARSER.disable(["reference", "html_block", "html_inline", "image"])

_CODE_THEME = "ansi_dark"
"""Uses the terminal's own colors, without a background."""

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters, with which a text could drive the terminal, and overrides of its direction,
with which it could disguise itself; but for tabs and line ends."""

_ITEM = "list_item_open"


def printable(text: str) -> str:
    """The text without control characters."""
    return _CONTROL.sub("", text)


@dataclass(frozen=True, slots=True)
class MarkdownBlock:
    """A block at the top level of a text, or an item of a list there.

    Attributes:
        kind: markdown-it's type of its first token; of an item with that of its list.
        source: its text.
        num_lines: lines of the text up to its end, from the end of the block before it.
    """

    kind: str
    source: str
    num_lines: int

    def follows_closely(self, kind: str) -> bool:
        """Whether no empty line is between a block of ``kind`` and this one."""
        return kind == self.kind and _ITEM in kind


def split_blocks(text: str) -> list[MarkdownBlock]:
    """Split a text into blocks. All but the last stay as they are if the text grows."""
    lines = text.split("\n")
    starts: list[tuple[str, int]] = []
    list_type = ""
    for token in _PARSER.parse(text):
        if token.map is None or token.nesting < 0:
            continue
        is_list = token.type in ("bullet_list_open", "ordered_list_open")
        if token.level == 0 and is_list:
            list_type = token.type
        elif token.level == 0:
            starts.append((token.type, token.map[0]))
        elif token.level == 1 and token.type == _ITEM:
            starts.append((f"{list_type} {_ITEM}", token.map[0]))
    blocks = []
    for index, (kind, start) in enumerate(starts):
        first = start if index else 0
        end = starts[index + 1][1] if index + 1 < len(starts) else len(lines)
        blocks.append(MarkdownBlock(kind, "\n".join(lines[first:end]), end - first))
    return blocks


class _LeftHeading(Heading):
    """A heading at the left."""

    LEVEL_ALIGN = {f"h{level}": "left" for level in range(1, 7)}  # noqa: RUF012


class _PlainCodeBlock(CodeBlock):
    """Code in the terminal's colors, indented by two columns."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(
            str(self.text).rstrip(),
            self.lexer_name,
            theme=self.theme,
            background_color="default",
            word_wrap=True,
            padding=(0, 2),
        )


class ChatMarkdown(Markdown):
    """Rich's Markdown, with the line ends that the model has written."""

    elements: dict[str, type[MarkdownElement]] = {  # type: ignore[misc] # noqa: RUF012
        **Markdown.elements,
        "heading_open": _LeftHeading,
        "fence": _PlainCodeBlock,
        "code_block": _PlainCodeBlock,
    }

    def __init__(self, markup: str) -> None:
        super().__init__("", code_theme=_CODE_THEME, hyperlinks=False)
        self.markup = markup
        self.parsed = _PARSER.parse(markup)
        _keep_line_ends(self.parsed)


def _keep_line_ends(tokens: list[Token]) -> None:
    for token in tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"


Line = list[Segment]


def render_block(block: MarkdownBlock, console: Console, width: int) -> list[Line]:
    """Render a block as lines without empty ones around it, and without spaces at their ends."""
    options = console.options.update(width=width, height=None)
    lines = console.render_lines(ChatMarkdown(block.source), options, pad=False)
    lines = [_stripped(line) for line in lines]
    while lines and not lines[-1]:
        lines.pop()
    while lines and not lines[0]:
        lines.pop(0)
    return lines


def _stripped(line: Line) -> Line:
    """The line without spaces at its end."""
    line = list(line)
    while line:
        text, style, _ = line[-1]
        if style is not None and style.bgcolor is not None and not style.bgcolor.is_default:
            break
        kept = text.rstrip(" ")
        if kept:
            line[-1] = Segment(kept, style)
            break
        line.pop()
    return line


def line_text(line: Line) -> str:
    """The characters of a line."""
    return "".join(segment.text for segment in line)
