"""Counts tokens as a target does: by its tokenizer, by its own /tokenize, or by a guess."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tgi_cli.bench.events import BenchRequest, BenchRequestRecord
from tgi_cli.bench.settings import TokenCounter
from tgi_cli.errors import RouterError
from tgi_cli.text.tokenizer import Tokenizer

_VOCABULARY_WORD = re.compile(r"[\u0120\u2581]?([a-z]{2,12})")
"""A word, behind the mark of a space in byte-level and SentencePiece vocabularies."""
_MOST_WORDS = 4000
_ENOUGH_WORDS = 64

COMMON_WORDS = Path(__file__).with_name("common_words.txt").read_text().split()
"""Short English words; one token each in nearly every vocabulary."""


class LocalTokenCounter:
    """A tokenizer of this machine."""

    exact = True

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._words: list[str] = []

    @classmethod
    def load(cls, folder: Path, name: str) -> LocalTokenCounter:
        """Of a model's folder. Raises ModelError."""
        return cls(Tokenizer.load(folder), name)

    def count(self, text: str, special: bool = True) -> int:
        """See :class:`tgi_cli.bench.settings.TokenCounter`."""
        return len(self._tokenizer.encode(text, add_special_tokens=special))

    def words(self) -> Sequence[str]:
        """The most frequent words of the vocabulary that are one token, wherever they stand."""
        if not self._words:
            self._words = self._found()
        return self._words

    def _found(self) -> list[str]:
        vocabulary = self._tokenizer.backend.get_vocab(with_added_tokens=False)
        ranked = sorted(vocabulary.items(), key=lambda item: item[1])
        matches = (_VOCABULARY_WORD.fullmatch(token) for token, _ in ranked)
        names = dict.fromkeys(match[1] for match in matches if match)
        candidates = list(names)[:_MOST_WORDS] or COMMON_WORDS
        within = self._costs([f"the {word}" for word in candidates])
        first = self._costs(candidates)
        base = self.count("the", special=False)
        inner = [
            (word, alone)
            for word, both, alone in zip(candidates, within, first, strict=True)
            if both == base + 1
        ]
        anywhere = [word for word, alone in inner if alone == 1]
        if len(anywhere) >= _ENOUGH_WORDS:
            return anywhere
        return [word for word, _ in inner] or COMMON_WORDS

    def _costs(self, texts: list[str]) -> list[int]:
        encoded = self._tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [len(one.ids) for one in encoded]


class ServerTokenCounter:
    """The server's own /tokenize: TGI's, vLLM's (SGLang's) or llama.cpp's.

    Raises:
        RouterError: from :meth:`count`, when the server no longer answers.
    """

    exact = True

    def __init__(self, url: str, client: httpx.Client, form: str, model: str) -> None:
        self.name = f"{url}/tokenize"
        self._client = client
        self._form = form
        self._model = model
        self._overhead = 0
        self._overhead = 2 * self.count("the") - self.count("the the")

    @classmethod
    def find(cls, url: str, client: httpx.Client, model: str) -> ServerTokenCounter | None:
        """The form that the server understands; None: it has no such route."""
        for form in ("tgi", "vllm", "llama"):
            try:
                return cls(url, client, form, model)
            except RouterError:
                continue
        return None

    def count(self, text: str, special: bool = True) -> int:
        """See :class:`tgi_cli.bench.settings.TokenCounter`."""
        if not text:
            return self._overhead if special else 0
        tokens = self._asked(text)
        return tokens if special else tokens - self._overhead

    def words(self) -> Sequence[str]:
        """Common ones."""
        return COMMON_WORDS

    def _asked(self, text: str) -> int:
        bodies: dict[str, dict[str, Any]] = {
            "tgi": {"inputs": text},
            "vllm": {"model": self._model, "prompt": text, "add_special_tokens": True},
            "llama": {"content": text, "add_special": True},
        }
        try:
            response = self._client.post(self.name, json=bodies[self._form])
            response.raise_for_status()
            answer = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise RouterError(f"{self.name} does not count tokens: {error}") from error
        if self._form == "tgi" and isinstance(answer, list):
            return len(answer)
        if isinstance(answer, dict) and isinstance(answer.get("count"), int):
            return int(answer["count"])
        if isinstance(answer, dict) and isinstance(answer.get("tokens"), list):
            return len(answer["tokens"])
        raise RouterError(f"{self.name} answers in a form that is not known")


class TokenEstimator:
    """A token for a short word, for six letters of a longer one, and for every sign."""

    exact = False
    name = "a guess from the letters"
    _PIECE = re.compile(r"[^\W_]{1,6}|[^\w\s]|_")

    def count(self, text: str, special: bool = True) -> int:
        """See :class:`tgi_cli.bench.settings.TokenCounter`."""
        return len(self._PIECE.findall(text))

    def words(self) -> Sequence[str]:
        """Common ones of six letters at most."""
        return [word for word in COMMON_WORDS if len(word) <= 6]


_CHECKED = 64
"""Requests of a step whose usage is checked."""
_TOLERANCE = 0.02


class TokenRecount:
    """Counts with the target's tokenizer; without one, or with a guess, it leaves all as it is."""

    def __init__(self, tokenizer: TokenCounter | None) -> None:
        self._tokenizer = tokenizer if tokenizer is not None and tokenizer.exact else None
        self.reset()

    def reset(self) -> None:
        """Forget what was counted: a step begins."""
        self._answers = self._said = self._counted = self._bare = 0
        self._prompts: dict[int, int] = {}
        self._read = self._made = self._compared = 0

    def expect(self, index: int, request: BenchRequest) -> None:
        """A request that will be sent: its server should read as many tokens as it has.

        Not of messages, around which a template is put, nor of what goes on with something.
        """
        plain = request.messages is None and request.conversation is None
        if self._tokenizer is not None and plain and len(self._prompts) < _CHECKED:
            self._prompts[index] = request.prompt_tokens

    async def count(self, record: BenchRequestRecord, text: str) -> BenchRequestRecord:
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
