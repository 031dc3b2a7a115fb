"""Blocks of a growing text, and how they are rendered."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tgi_cli.chat.markdown import line_text, printable, render_block, split_blocks

TEXT = """\
# A heading

Some *text* with `code`, List<String> and <b>
in two lines

1. one
   - nested
2. two

   in two paragraphs
- other list

```python
def f():

    return 1
```
| a | b |
|---|--:|
| 1 | 2 |

[1]: http://example.org
"""


def rendered(text: str, width: int = 40) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    lines = [render_block(block, console, width) for block in split_blocks(text)]
    return ["|".join(map(line_text, block)) for block in lines]


def test_blocks() -> None:
    blocks = split_blocks(TEXT)
    assert [block.kind.removesuffix("_open") for block in blocks] == [
        "heading",
        "paragraph",
        "ordered_list_open list_item",
        "ordered_list_open list_item",
        "bullet_list_open list_item",
        "fence",
        "table",
        "paragraph",
    ]
    assert "\n".join(block.source for block in blocks) == TEXT
    assert sum(block.num_lines for block in blocks) == len(TEXT.split("\n"))
    assert blocks[3].follows_closely(blocks[2].kind)
    assert not blocks[4].follows_closely(blocks[3].kind)
    assert not blocks[1].follows_closely(blocks[1].kind)


def test_all_blocks_but_the_last_stay_as_they_are() -> None:
    whole = [block.source.rstrip("\n") for block in split_blocks(TEXT)]
    for end in range(len(TEXT)):
        settled = [block.source.rstrip("\n") for block in split_blocks(TEXT[:end])][:-1]
        assert settled == whole[: len(settled)], TEXT[:end]


def test_nothing_that_the_model_writes_is_left_out() -> None:
    lines = rendered(TEXT)
    assert lines == [
        "A heading",
        "Some text with code, List<String> and|<b>|in two lines",
        " 1 one|    • nested",
        " 2 two|   in two paragraphs",
        " • other list",
        "  def f():||      return 1",
        " a  b| ────| 1  2",
        "[1]: http://example.org",
    ]


@pytest.mark.parametrize("text", ["", "\n\n", "   "])
def test_no_text_has_no_blocks(text: str) -> None:
    assert split_blocks(text) == []


def test_a_line_that_is_too_long_is_folded() -> None:
    assert rendered("x" * 100) == ["x" * 40 + "|" + "x" * 40 + "|" + "x" * 20]
    assert rendered("```\n" + "y" * 50 + "\n```") == ["  " + "y" * 36 + "|  " + "y" * 14]


def test_a_text_cannot_drive_the_terminal() -> None:
    assert printable("a\x1b]0;title\x07b\x9b2Jc\r\n\td\u202e") == "a]0;titleb2Jc\n\td"
