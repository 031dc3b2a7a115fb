"""Tokens of long texts, found piece by piece: in bounded memory, and no further than needed.

A tokenizer holds up to 400 bytes for each byte of a text, and one call for a whole text gives
nothing back before its end. Here a window of the text is encoded at a time. Each begins at a token
of the one before it, some way ahead of that one's end, and counts from where the two have agreed
for a while: which tokens a text has follows from the text at hand, not from what stands far
before it. Where two windows do not agree, the earlier one is taken twice as long, up to the end
of the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tgi_cli.text.tokenizer import Tokenizer

WHOLE_BYTES = 64 * 1024
"""Of UTF-8: texts of up to so many are encoded in one call, which takes 25 MB in the tokenizer."""
WINDOW_CHARACTERS = 16 * 1024
"""Of longer ones at a time: 5 MB, and 25 MB where each character takes four tokens."""
_OVERLAP_TOKENS = 192
_AGREED_TOKENS = 32
"""In a row, the same in both windows."""
_END_TOKENS = 64
"""Of a window, which cutting the text may have changed."""

Span = tuple[int, int, int]
"""An id, and the characters of the text, from and up to, that it stands for."""


def is_long(text: str) -> bool:
    """Whether a text is to be encoded in windows."""
    if text.isascii() or len(text) > WHOLE_BYTES:
        return len(text) > WHOLE_BYTES
    return len(text) * 4 > WHOLE_BYTES and len(text.encode(errors="replace")) > WHOLE_BYTES


def encode_in_windows(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, window: int = WINDOW_CHARACTERS
) -> Iterator[list[Span]]:
    """All tokens of the text, those of a window at a time."""
    first, last = _specials(tokenizer) if add_special_tokens else ([], [])
    yield [(token_id, 0, 0) for token_id in first]
    yield from _windows(tokenizer, text, window)
    yield [(token_id, 0, 0) for token_id in last]


def _windows(tokenizer: Tokenizer, text: str, window: int) -> Iterator[list[Span]]:
    start, size = 0, window
    told = 0
    """How many tokens of the window are known to the caller already."""
    before: list[Span] = []
    """What the window before has from this one's start on."""
    longer = (0, 0, 0)
    """The start, the size and ``told`` of the window before, when it is to be taken again."""
    while True:
        found = _encode(tokenizer, text, start, start + size)
        if before:
            agreed = _agreement(before, found)
            if agreed is None:
                (start, size, told), before = longer, []
                continue
            yield before[: agreed[0]]
            told, before = agreed[1], []
        if start + size >= len(text):
            yield found[told:]
            return
        end = len(found) - _END_TOKENS
        cut = _boundary(found, told + _AGREED_TOKENS, end - _OVERLAP_TOKENS)
        if cut is None:  # few tokens, each of much text
            size *= 2
            continue
        yield found[told:cut]
        before = found[cut:end]
        longer = (start, size * 2, cut)
        start, size = before[0][1], window


def _encode(tokenizer: Tokenizer, text: str, start: int, stop: int) -> list[Span]:
    found = tokenizer.spans(text[start:stop], add_special_tokens=False)
    return [(token_id, start + begin, start + end) for token_id, begin, end in found]


def _boundary(found: list[Span], first: int, last: int) -> int | None:
    """The last place up to ``last`` where a token begins with a character; None: there is none."""
    for place in range(last, first, -1):
        if found[place - 1][2] <= found[place][1] < found[place][2]:
            return place
    return None


def _agreement(before: list[Span], found: list[Span]) -> tuple[int, int] | None:
    """Where in both lists the first long run of equal tokens begins; None: nowhere."""
    places = {token: place for place, token in enumerate(found[: 4 * len(before)])}
    for place in range(len(before) - _AGREED_TOKENS + 1):
        other = places.get(before[place])
        if other is None:
            continue
        if before[place : place + _AGREED_TOKENS] == found[other : other + _AGREED_TOKENS]:
            return place, other
    return None


def _specials(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What the tokenizer adds to a text, before and behind it."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a", add_special_tokens=True)
    for place in range(len(whole) - len(bare) + 1):
        if whole[place : place + len(bare)] == bare:
            return whole[:place], whole[place + len(bare) :]
    return [], []
