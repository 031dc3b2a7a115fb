"""Counts tokens: by the model's tokenizer, by the server's /tokenize, or by an estimate."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tgi_cli.bench.events import BenchRequest, BenchRequestRecord
from tgi_cli.bench.settings import TokenCounter
from tgi_cli.errors import RouterError
from tgi_cli.text.tokenizer import Tokenizer

_VOCABULARY_WORD = re.compile(r"[\u0120\u2581]?([a-z]{2,12})")
"""A word after the space of byte-level and SentencePiece vocabularies."""
_MOST_WORDS = 4000
_ENOUGH_WORDS = 64

COMMON_WORDS = Path(__file__).with_name("common_words.txt").read_text().split()
"""Short English words; one token each in nearly every vocabulary."""


class LocalTokenCounter:
    """Counts with a local tokenizer."""

    exact = True

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._words: list[str] = []

    @classmethod
    def load(cls, folder: Path, name: str) -> LocalTokenCounter:
        """Load the tokenizer of a model's folder. Raises ModelError."""
        return cls(Tokenizer.load(folder), name)

    def count(self, text: str, special: bool = True) -> int:
        """See :class:`tgi_cli.bench.settings.TokenCounter`."""
        return len(self._tokenizer.encode(text, add_special_tokens=special))

    def words(self) -> Sequence[str]:
        """The most frequent words of the vocabulary that are one token in any position."""
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
    """Counts with the server's /tokenize: TGI's, vLLM's (SGLang's) or llama.cpp's.

    Raises:
        RouterError: From :meth:`count`, if the server no longer responds.
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
        """The counter of the server's format, or None if it has no /tokenize."""
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
        tokens = self._request(text)
        return tokens if special else tokens - self._overhead

    def words(self) -> Sequence[str]:
        """Common words."""
        return COMMON_WORDS

    def _request(self, text: str) -> int:
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
        raise RouterError(f"{self.name} responds in an unknown format")


class TokenEstimator:
    """Estimates a token per six letters of a word, and per punctuation mark."""

    exact = False
    name = "an estimate"
    _PIECE = re.compile(r"[^\W_]{1,6}|[^\w\s]|_")

    def count(self, text: str, special: bool = True) -> int:
        """See :class:`tgi_cli.bench.settings.TokenCounter`."""
        return len(self._PIECE.findall(text))

    def words(self) -> Sequence[str]:
        """Common words of at most six letters."""
        return [word for word in COMMON_WORDS if len(word) <= 6]


_CHECKED = 64
"""Requests per step with checked usage."""
_TOLERANCE = 0.02


@dataclass
class _Difference:
    """Token counts of the server beside our own, in so many texts."""

    server: int = 0
    local: int = 0
    texts: int = 0

    def add(self, server: int, local: int) -> None:
        self.server += server
        self.local += local
        self.texts += 1

    @property
    def significant(self) -> bool:
        """Whether the difference exceeds the tolerance, and a token per text.

        The usage includes the token that ends a response, which its text lacks; and a server may
        omit or add the special token in front of a prompt.
        """
        return abs(self.server - self.local) > max(_TOLERANCE * self.server, self.texts)


class TokenRecount:
    """Counts tokens of responses without usage, and checks usage; only with an exact tokenizer."""

    def __init__(self, tokenizer: TokenCounter | None) -> None:
        self._tokenizer = tokenizer if tokenizer is not None and tokenizer.exact else None
        self.reset()

    def reset(self) -> None:
        """Start over for a new step."""
        self._output, self._input = _Difference(), _Difference()
        self._expected: dict[int, int] = {}
        self._uncounted = False

    def expect(self, index: int, request: BenchRequest) -> None:
        """Expect a request's prompt tokens in the usage.

        Messages are not checked, because of their template, nor are conversations and images.
        """
        plain = request.messages is None and request.conversation is None and not request.images
        if self._tokenizer is not None and plain and len(self._expected) < _CHECKED:
            self._expected[index] = request.prompt_tokens

    async def count(self, record: BenchRequestRecord, text: str) -> BenchRequestRecord:
        """Return the record, with its output counted if there is no usage."""
        if record.error is not None:
            return record
        usage = record.counted_by == "usage"
        if usage and record.index in self._expected:
            self._input.add(record.input_tokens, self._expected[record.index])
        if not text or (usage and self._output.texts >= _CHECKED):
            return record
        if self._tokenizer is None:
            self._uncounted |= not usage
            return record
        tokens = await asyncio.to_thread(self._tokenizer.count, text, False)
        if usage:
            self._output.add(record.output_tokens, tokens)
            return record
        return msgspec.structs.replace(record, output_tokens=tokens, counted_by="tokenizer")

    def notes(self) -> list[str]:
        """Notes on the counts of the step."""
        notes = []
        name = self._tokenizer.name if self._tokenizer is not None else ""
        if (found := self._output).significant:
            notes.append(
                f"The server's usage is {found.server} output tokens where {name} counts "
                f"{found.local} in the same text ({found.texts} responses): the tokenizer may be "
                "another model's, or tokens are not text."
            )
        if (found := self._input).significant:
            notes.append(
                f"The server reads {found.server} prompt tokens where {name} counts {found.local} "
                f"({found.texts} prompts): the tokenizer may be another model's."
            )
        if self._uncounted:
            notes.append(
                "The server reports no token counts and there is no tokenizer: events were counted."
            )
        return notes
