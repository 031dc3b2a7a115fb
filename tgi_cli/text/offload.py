"""Long work on text, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from tgi_cli.text import bad_words
from tgi_cli.text.tokenizer import Tokenizer

P = ParamSpec("P")
T = TypeVar("T")

INLINE_CHARACTERS = 2048
"""Encoded on the loop itself: 0.2 us a character, so 0.4 ms; a thread's round trip costs 0.1 ms
and would make short prompts slower. Longer ones must not hold up everybody's tokens."""
_WORD_CHARACTERS = 24
"""What a call costs for each of several texts, as characters of one: 5 us."""


class TextWorkers:
    """Threads for long texts; the tokenizer drops the interpreter lock meanwhile."""

    def __init__(self, tokenizer: Tokenizer, threads: int) -> None:
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(max(threads, 1), thread_name_prefix="tokenize")

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """As :meth:`Tokenizer.encode`."""
        if len(text) <= INLINE_CHARACTERS:
            return self._tokenizer.encode(text, add_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, self._tokenizer.encode, text, add_special_tokens
        )

    async def spans(self, text: str, add_special_tokens: bool) -> list[tuple[int, int, int]]:
        """As :meth:`Tokenizer.spans`."""
        if len(text) <= INLINE_CHARACTERS:
            return self._tokenizer.spans(text, add_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, self._tokenizer.spans, text, add_special_tokens
        )

    async def word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """As :func:`tgi_cli.text.bad_words.word_ids`."""
        characters = 3 * sum(len(word) + _WORD_CHARACTERS for word in words)
        if characters <= INLINE_CHARACTERS:
            return bad_words.word_ids(self._tokenizer, words)
        return await self.run(bad_words.word_ids, self._tokenizer, words)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Any other long work on text."""
        called = partial(work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, called)

    def close(self) -> None:
        """End the threads; work that has not begun is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
