"""Long work on text, off the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.text.windowed_encoding import Span, encode_in_windows, is_long

P = ParamSpec("P")
T = TypeVar("T")

INLINE_CHARACTERS = 2048
"""Encoded on the loop itself: 0.2 us a character, so 0.4 ms; a thread's round trip costs 0.1 ms
and would make short prompts slower. Longer ones must not hold up everybody's tokens."""
_SLOW_SECONDS = 0.02
"""Of processor time. A tokenizer that takes so long for a short text has regular expressions that
may take 0.7 s for each match: it is not run on the loop again."""
_LINE = "\n"
"""Text that a word can follow without a space; no vocabulary joins it with a letter."""
_WORD_CHARACTERS = 24
"""What a call costs for each of several texts, as characters of one: 5 us."""


class TextWorkers:
    """Threads for long texts; the tokenizer drops the interpreter lock meanwhile."""

    def __init__(self, tokenizer: Tokenizer, threads: int) -> None:
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(max(threads, 1), thread_name_prefix="tokenize")
        self._inline_characters = INLINE_CHARACTERS

    async def encode(
        self, text: str, add_special_tokens: bool, most: int | None = None, last: int | None = None
    ) -> list[int]:
        """As :meth:`Tokenizer.encode`.

        Args:
            text: to be encoded.
            add_special_tokens: see there.
            most: a long text that has more tokens is not encoded to its end: the caller refuses
                it anyway, and gets a few more than so many.
            last: keep only the last so many.
        """
        if len(text) <= self._inline_characters:
            ids = self._inline(self._tokenizer.encode, text, add_special_tokens)
        elif not is_long(text):
            ids = await self.run(self._tokenizer.encode, text, add_special_tokens)
        else:
            found: deque[int] = deque(maxlen=last)
            async for window in self.spans(text, add_special_tokens):
                found.extend(span[0] for span in window)
                if most is not None and len(found) > most:
                    break
            return list(found)
        return ids if last is None else ids[-last:]

    async def spans(self, text: str, add_special_tokens: bool) -> AsyncIterator[list[Span]]:
        """As :meth:`Tokenizer.spans`; of long texts some thousand at a time."""
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
        """As :func:`word_ids`."""
        characters = 3 * sum(len(word) + _WORD_CHARACTERS for word in words)
        if characters <= self._inline_characters:
            return self._inline(word_ids, self._tokenizer, words)
        return await self.run(word_ids, self._tokenizer, words)

    def _inline(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do it here, and for the last time if that takes long."""
        begun = time.thread_time()
        try:
            return work(*args, **kwargs)
        finally:
            if time.thread_time() - begun > _SLOW_SECONDS:
                self._inline_characters = -1

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Any other long work on text."""
        called = partial(work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, called)

    def close(self) -> None:
        """End the threads; work that has not begun is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word at the start of a text, behind a space and within a line, each once.

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
