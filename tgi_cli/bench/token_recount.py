"""Tokens, counted here: of answers whose server does not say, and to check one that does."""

from __future__ import annotations

import asyncio

import msgspec

from tgi_cli.bench.events import Request, RequestRecord
from tgi_cli.bench.settings import TokenCounter

_CHECKED = 64
"""Requests of a step whose usage is checked."""
_TOLERANCE = 0.02


class Recount:
    """Counts with the target's tokenizer; without one, or with a guess, it leaves all as it is."""

    def __init__(self, tokenizer: TokenCounter | None) -> None:
        self._tokenizer = tokenizer if tokenizer is not None and tokenizer.exact else None
        self.begin()

    def begin(self) -> None:
        """Forget what was counted: a step begins."""
        self._answers = self._said = self._counted = self._bare = 0
        self._prompts: dict[int, int] = {}
        self._read = self._made = self._compared = 0

    def expect(self, index: int, request: Request) -> None:
        """A request that will be sent: its server should read as many tokens as it has.

        Not of messages, around which a template is put, nor of what goes on with something.
        """
        plain = request.messages is None and request.conversation is None
        if self._tokenizer is not None and plain and len(self._prompts) < _CHECKED:
            self._prompts[index] = request.prompt_tokens

    async def count(self, record: RequestRecord, text: str) -> RequestRecord:
        """The record, with its output counted if its server did not say."""
        if record.counted_by == "usage" and record.error is None and record.index in self._prompts:
            self._compared += 1
            self._read += record.input_tokens
            self._made += self._prompts[record.index]
        if not text or record.error is not None:
            return record
        if record.counted_by == "usage":
            if self._tokenizer is not None and self._answers < _CHECKED:
                self._answers += 1
                self._said += record.output_tokens
                self._counted += await self._tokens(text)
            return record
        if self._tokenizer is None:
            self._bare += 1
            return record
        tokens = await self._tokens(text)
        return msgspec.structs.replace(record, output_tokens=tokens, counted_by="tokenizer")

    def notes(self) -> list[str]:
        """What the step's counts leave to be said."""
        notes = []
        difference = abs(self._said - self._counted)
        # A token that ends an answer is counted by its server, and is not in its text.
        if difference > max(_TOLERANCE * self._said, self._answers):
            assert self._tokenizer is not None
            notes.append(
                f"The server's usage is {self._said} output tokens where {self._tokenizer.name} "
                f"counts {self._counted} in the same text ({self._answers} answers): the tokenizer "
                "may be another model's, or tokens are not text."
            )
        difference = abs(self._read - self._made)
        # A server may leave out the one token that a tokenizer puts in front, or add it.
        if difference > max(_TOLERANCE * self._made, self._compared):
            assert self._tokenizer is not None
            notes.append(
                f"The server reads {self._read} prompt tokens where {self._tokenizer.name} counts "
                f"{self._made} ({self._compared} prompts): the tokenizer may be another model's."
            )
        if self._bare:
            notes.append(
                "The server does not say how many tokens it generates, and there is no tokenizer "
                "to count them: events were counted."
            )
        return notes

    async def _tokens(self, text: str) -> int:
        assert self._tokenizer is not None
        return await asyncio.to_thread(self._tokenizer.count, text, False)
