"""Runs long work on text in threads, off the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from tgi_cli.text.fill_in_middle import PromptParts, TextPart
from tgi_cli.text.spans import Spans
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.text.windowed_encoding import WINDOW_CHARACTERS, encode_in_windows, is_long

P = ParamSpec("P")
T = TypeVar("T")

INLINE_CHARACTERS = 2048
"""Longest text that is encoded on the event loop: 0.2 us a character, so 0.4 ms. A thread's round
trip costs 0.1 ms and would slow down short prompts; longer ones would delay other requests."""
_SLOW_SECONDS = 0.02
"""CPU time for a short text from which on the tokenizer runs in threads alone: its regular
expressions may take 0.7 s for each match."""
_LINE = "\n"
"""A word can follow it without a space, and no vocabulary joins it with a letter."""
_WORD_CHARACTERS = 24
"""Cost of each of several texts in one call, 5 us, in characters of a single text."""


class TextWorkers:
    """Threads for long texts. The tokenizer releases the interpreter lock."""

    def __init__(self, tokenizer: Tokenizer, threads: int) -> None:
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(max(threads, 1), thread_name_prefix="tokenize")
        self._inline_characters = INLINE_CHARACTERS

    async def encode(
        self, text: str, add_special_tokens: bool, most: int | None = None, last: int | None = None
    ) -> list[int]:
        """Encode a text; see :meth:`Tokenizer.encode`.

        Args:
            most: Stop encoding a long text after a few more tokens than this: the caller will
                refuse it.
            last: Return this many last tokens.
        """
        if len(text) <= self._inline_characters:
            ids = self._inline(self._tokenizer.encode, text, add_special_tokens)
        elif not is_long(text):
            ids = await self.run(self._tokenizer.encode, text, add_special_tokens)
        else:
            found: deque[int] = deque(maxlen=last)
            async for window in self.spans(text, add_special_tokens):
                found.extend(window.ids)
                if most is not None and len(found) > most:
                    break
            return list(found)
        return ids if last is None else ids[-last:]

    async def count(self, text: str, add_special_tokens: bool) -> int:
        """Number of tokens of a text, without holding a million of them.

        Only to delete that many integers takes the event loop 30 ms.
        """
        if not is_long(text):
            return len(await self.encode(text, add_special_tokens))
        return sum([len(window.ids) async for window in self.spans(text, add_special_tokens)])

    async def encode_parts(self, prompt: PromptParts, most: int | None = None) -> list[int]:
        """Encode the texts of a prompt by themselves; ``most`` as in :meth:`encode`."""
        found: list[int] = []
        for group in _groups(prompt.parts):
            if len(group) == 1 and isinstance(group[0], TextPart) and is_long(group[0].text):
                rest = None if most is None else max(0, most - len(found))
                found += await self._encode_long(group[0], rest)
            elif sum(map(_cost, group)) <= self._inline_characters:
                found += self._inline(parts_ids, self._tokenizer, group)
            else:
                found += await self.run(parts_ids, self._tokenizer, group)
            if most is not None and len(found) > most:
                break
        return found

    async def _encode_long(self, part: TextPart, most: int | None) -> list[int]:
        if not (part.continues and self._tokenizer.adds_space):
            return await self.encode(part.text, False, most)
        line = self._tokenizer.encode(_LINE, add_special_tokens=False)
        ids = await self.encode(_LINE + part.text, False, most)
        return ids[len(line) :]

    async def spans(self, text: str, add_special_tokens: bool) -> AsyncIterator[Spans]:
        """See :meth:`Tokenizer.spans`; long texts give some thousand tokens at a time."""
        if len(text) <= self._inline_characters:
            yield self._inline(self._tokenizer.spans, text, add_special_tokens)
            return
        if not is_long(text):
            yield await self.run(self._tokenizer.spans, text, add_special_tokens)
            return
        windows = encode_in_windows(self._tokenizer, text, add_special_tokens)
        while (window := await self.run(next, windows, None)) is not None:
            yield window

    async def word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """See :func:`word_ids`."""
        characters = 3 * sum(len(word) + _WORD_CHARACTERS for word in words)
        if characters <= self._inline_characters:
            return self._inline(word_ids, self._tokenizer, words)
        return await self.run(word_ids, self._tokenizer, words)

    def _inline(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work on the event loop; never again if it takes long."""
        begun = time.thread_time()
        try:
            return work(*args, **kwargs)
        finally:
            if time.thread_time() - begun > _SLOW_SECONDS:
                self._inline_characters = -1

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run other long work on text in a thread."""
        called = partial(work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, called)

    def close(self) -> None:
        """End the threads and drop work that has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _cost(part: tuple[int, ...] | TextPart) -> int:
    """Cost of encoding a part, in characters of a single text."""
    return len(part.text) + _WORD_CHARACTERS if isinstance(part, TextPart) else 0


def _groups(
    parts: Sequence[tuple[int, ...] | TextPart],
) -> Iterator[list[tuple[int, ...] | TextPart]]:
    """The parts in groups that are encoded in one call; a long text is a group of its own."""
    group: list[tuple[int, ...] | TextPart] = []
    size = 0
    for part in parts:
        cost = _cost(part)
        if group and size + cost > WINDOW_CHARACTERS:
            yield group
            group, size = [], 0
        group.append(part)
        size += cost
    yield group


def parts_ids(tokenizer: Tokenizer, parts: Sequence[tuple[int, ...] | TextPart]) -> list[int]:
    """Token ids of parts of a prompt. One call of the tokenizer encodes all texts."""
    behind_line = tokenizer.adds_space
    texts = [
        _LINE + part.text if part.continues and behind_line else part.text
        for part in parts
        if isinstance(part, TextPart)
    ]
    line, *encoded = tokenizer.encode_batch([_LINE, *texts], add_special_tokens=False)
    found: list[int] = []
    following = iter(encoded)
    for part in parts:
        if not isinstance(part, TextPart):
            found += part
            continue
        ids = next(following)
        found += ids[len(line) :] if part.continues and behind_line else ids
    return found


def word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word at the start of a text, after a space and within a line, each once.

    A model could still spell a word with other tokens. One call of the tokenizer, which releases
    the interpreter lock, encodes all of them.
    """
    texts = [_LINE]
    for word in words:
        bare = word.lstrip(" ")
        texts += (bare, " " + bare, _LINE + bare)
    line, *encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    found: dict[tuple[int, ...], None] = {}
    for index, ids in enumerate(encoded):
        if index % 3 == 2:
            ids = ids[len(line) :] if ids[: len(line)] == line else []
        if ids:
            found[tuple(ids)] = None
    return tuple(found)
