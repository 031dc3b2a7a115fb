"""Encodes long texts in windows: in bounded memory, and no further than needed.

A tokenizer takes up to 400 bytes for each byte of a text, and returns nothing before the end of
the text. So one window of the text is encoded at a time. Windows overlap, and each counts from
the point where its tokens agree with those of the previous one: tokens depend on nearby text
alone. If two windows do not agree, the earlier one is doubled, up to the end of the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tgi_cli.text.spans import Span, Spans

if TYPE_CHECKING:
    from tgi_cli.text.tokenizer import Tokenizer

WHOLE_BYTES = 64 * 1024
"""Longest text, as UTF-8, that is encoded in one call; the tokenizer takes 25 MB for it."""
WINDOW_CHARACTERS = 4 * 1024
"""Size of a window: 2 MB in the tokenizer, or 7 MB if each character takes four tokens. Reading its
offsets holds the interpreter lock for 0.3 to 2 ms, and the event loop may wait that long at each
callback."""
_OVERLAP_TOKENS = 192
_AGREED_TOKENS = 32
"""Consecutive tokens that must be equal in both windows."""
_END_TOKENS = 64
"""Last tokens of a window, which depend on where the text was split."""


def is_long(text: str) -> bool:
    """Whether a text must be encoded in windows."""
    if text.isascii() or len(text) > WHOLE_BYTES:
        return len(text) > WHOLE_BYTES
    return len(text) * 4 > WHOLE_BYTES and len(text.encode(errors="replace")) > WHOLE_BYTES


def encode_in_windows(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, window: int = WINDOW_CHARACTERS
) -> Iterator[Spans]:
    """All tokens of the text, one window at a time."""
    first, last = special_affixes(tokenizer) if add_special_tokens else ([], [])
    yield Spans(first, [(0, 0)] * len(first))
    yield from _windows(tokenizer, text, window)
    yield Spans(last, [(0, 0)] * len(last))


def _windows(tokenizer: Tokenizer, text: str, window: int) -> Iterator[Spans]:
    start, size = 0, window
    known = 0
    """Tokens of the window that the caller has already."""
    before = Spans([], [])
    """Tokens of the previous window from this one's start on."""
    longer = (0, 0, 0)
    """``start``, ``size`` and ``known`` of the previous window, to encode it again."""
    while True:
        found = tokenizer.spans(text[start : start + size], add_special_tokens=False).at(start)
        if before:
            agreed = _agreement(list(before), list(found[: 4 * len(before)]))
            if agreed is None:
                (start, size, known), before = longer, Spans([], [])
                continue
            yield before[: agreed[0]]
            known, before = agreed[1], Spans([], [])
        if start + size >= len(text):
            yield found[known:]
            return
        end = len(found) - _END_TOKENS
        cut = _boundary(found, known + _AGREED_TOKENS, end - _OVERLAP_TOKENS)
        if cut is None:  # few tokens, each of much text
            size *= 2
            continue
        yield found[known:cut]
        before = found[cut:end]
        longer = (start, size * 2, cut)
        start, size = start + before.offsets[0][0], window


def _boundary(found: Spans, first: int, last: int) -> int | None:
    """The last index up to ``last`` at which a token begins with a character, or None."""
    offsets = found.offsets
    for index in range(last, first, -1):
        if offsets[index - 1][1] <= offsets[index][0] < offsets[index][1]:
            return index
    return None


def _agreement(before: list[Span], found: list[Span]) -> tuple[int, int] | None:
    """Where in both lists the first long run of equal tokens begins, or None."""
    indices = {token: index for index, token in enumerate(found)}
    for index in range(len(before) - _AGREED_TOKENS + 1):
        other = indices.get(before[index])
        if other is None:
            continue
        if before[index : index + _AGREED_TOKENS] == found[other : other + _AGREED_TOKENS]:
            return index, other
    return None


def special_affixes(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer adds before and after a text."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a", add_special_tokens=True)
    for index in range(len(whole) - len(bare) + 1):
        if whole[index : index + len(bare)] == bare:
            return whole[:index], whole[index + len(bare) :]
    return [], []
