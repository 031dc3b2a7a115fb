"""Encodes long texts in windows: in bounded memory, and no further than needed.

A tokenizer takes up to 400 bytes for each byte of a text, and returns nothing before the end of
the text. So one window of the text is encoded at a time. Windows overlap, and each counts from
the point where its tokens agree with those of the previous one: tokens depend on nearby text
alone. If two windows do not agree, the earlier one is doubled, up to the end of the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tgi_cli.text.tokenizer import Tokenizer

WHOLE_BYTES = 64 * 1024
"""Longest text, as UTF-8, that is encoded in one call; the tokenizer takes 25 MB for it."""
WINDOW_CHARACTERS = 16 * 1024
"""Size of a window: 5 MB in the tokenizer, or 25 MB if each character takes four tokens."""
_OVERLAP_TOKENS = 192
_AGREED_TOKENS = 32
"""Consecutive tokens that must be equal in both windows."""
_END_TOKENS = 64
"""Last tokens of a window, which depend on where the text was split."""

Span = tuple[int, int, int]
"""A token id with the start and the end of its characters in the text."""


def is_long(text: str) -> bool:
    """Whether a text must be encoded in windows."""
    if text.isascii() or len(text) > WHOLE_BYTES:
        return len(text) > WHOLE_BYTES
    return len(text) * 4 > WHOLE_BYTES and len(text.encode(errors="replace")) > WHOLE_BYTES


def encode_in_windows(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, window: int = WINDOW_CHARACTERS
) -> Iterator[list[Span]]:
    """All tokens of the text, one window at a time."""
    first, last = _specials(tokenizer) if add_special_tokens else ([], [])
    yield [(token_id, 0, 0) for token_id in first]
    yield from _windows(tokenizer, text, window)
    yield [(token_id, 0, 0) for token_id in last]


def _windows(tokenizer: Tokenizer, text: str, window: int) -> Iterator[list[Span]]:
    start, size = 0, window
    known = 0
    """Tokens of the window that the caller has already."""
    before: list[Span] = []
    """Tokens of the previous window from this one's start on."""
    longer = (0, 0, 0)
    """``start``, ``size`` and ``known`` of the previous window, to encode it again."""
    while True:
        found = _encode(tokenizer, text, start, start + size)
        if before:
            agreed = _agreement(before, found)
            if agreed is None:
                (start, size, known), before = longer, []
                continue
            yield before[: agreed[0]]
            known, before = agreed[1], []
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
        start, size = before[0][1], window


def _encode(tokenizer: Tokenizer, text: str, start: int, stop: int) -> list[Span]:
    found = tokenizer.spans(text[start:stop], add_special_tokens=False)
    return [(token_id, start + begin, start + end) for token_id, begin, end in found]


def _boundary(found: list[Span], first: int, last: int) -> int | None:
    """The last index up to ``last`` at which a token begins with a character, or None."""
    for index in range(last, first, -1):
        if found[index - 1][2] <= found[index][1] < found[index][2]:
            return index
    return None


def _agreement(before: list[Span], found: list[Span]) -> tuple[int, int] | None:
    """Where in both lists the first long run of equal tokens begins, or None."""
    indices = {token: index for index, token in enumerate(found[: 4 * len(before)])}
    for index in range(len(before) - _AGREED_TOKENS + 1):
        other = indices.get(before[index])
        if other is None:
            continue
        if before[index : index + _AGREED_TOKENS] == found[other : other + _AGREED_TOKENS]:
            return index, other
    return None


def _specials(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer adds before and behind a text."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a", add_special_tokens=True)
    for index in range(len(whole) - len(bare) + 1):
        if whole[index : index + len(bare)] == bare:
            return whole[:index], whole[index + len(bare) :]
    return [], []
