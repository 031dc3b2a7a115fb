"""Windows of training tokens, drawn from the text and from conversations."""

import random
from collections.abc import Iterator

import numpy as np
from tokenizers import Tokenizer

from tests.tools.demo import corpus, dialogs
from tests.tools.demo import tokenizer as tokens


class TextWindows:
    """Windows of a token stream: every epoch a fresh offset, and each window once."""

    def __init__(self, stream: np.ndarray, rng: np.random.Generator) -> None:
        self._stream, self._rng = stream, rng
        self._length, self._starts = 0, np.empty(0, dtype=np.int64)

    def draw(self, length: int) -> np.ndarray:
        """Return the next window of `length` token ids (uint16)."""
        if length != self._length or not len(self._starts):
            starts = np.arange(self._rng.integers(length), len(self._stream) - length, length)
            self._length, self._starts = length, self._rng.permutation(starts)
        start, self._starts = self._starts[-1], self._starts[:-1]
        return self._stream[start : start + length]


class ChatWindows:
    """Windows of whole conversations, each window beginning with one."""

    def __init__(
        self, exchanges: list[dialogs.Exchange], tokenizer: Tokenizer, rng: random.Random
    ) -> None:
        self._exchanges, self._tokenizer, self._rng = exchanges, tokenizer, rng
        self._conversations = self._encoded()

    def _encoded(self) -> Iterator[list[int]]:
        while True:
            for messages in dialogs.epoch(self._exchanges, self._rng):
                yield [*self._tokenizer.encode(tokens.render(messages)).ids, tokens.END_OF_TEXT_ID]

    def draw(self, length: int) -> np.ndarray:
        """Return `length` token ids (uint16): conversations in a row, the last one cut."""
        ids: list[int] = []
        while len(ids) < length:
            ids.extend(next(self._conversations))
        return np.array(ids[:length], dtype=np.uint16)


def encode_stream(
    documents: list[corpus.Document], tokenizer: Tokenizer, rng: random.Random
) -> np.ndarray:
    """Return all documents in random order as token ids (uint16), each ended by end-of-text."""
    shuffled = rng.sample(documents, len(documents))
    encoded = tokenizer.encode_batch([document.text for document in shuffled])
    return np.concatenate(
        [np.array([*one.ids, tokens.END_OF_TEXT_ID], dtype=np.uint16) for one in encoded]
    )
