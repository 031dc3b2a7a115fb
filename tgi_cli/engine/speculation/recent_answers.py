"""The recent answers of a server, as a text to look drafts up in.

Only requests with the same tenant, salt and adapter share answers: the speed of a request reveals
whether its text was in them.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from tgi_cli.engine.speculation.token_index import SEPARATOR, SLICE, TokenIndex


class Key(NamedTuple):
    """Identifies requests that share answers; fields of ``GenerationRequest``."""

    tenant: bytes
    cache_salt: bytes
    adapter_id: int


MAX_TOKENS = 1 << 18
"""Limit of tokens over all keys, which take 4 MB."""

MAX_KEYS = 256
"""Limit of keys, which take at least 16 KB each."""

TEXT_TOKENS = 1 << 14
"""Length at which a key's text is closed. A key has two texts: when the newer one is full, the
older one is dropped."""

MAX_ANSWER = 1 << 12
"""Tokens of an answer that are kept: its last ones."""


class RecentAnswers:
    """Indexes the latest answers of each key, the latest keys."""

    def __init__(self) -> None:
        self._texts: OrderedDict[Key, list[TokenIndex]] = OrderedDict()
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens over all keys."""
        return self._num_tokens

    def add(self, key: Key, token_ids: Sequence[int]) -> None:
        """Add an answer."""
        if not token_ids:
            return
        indexes = self._texts.setdefault(key, [])
        if not indexes or len(indexes[0].tokens) >= TEXT_TOKENS:
            indexes.insert(0, TokenIndex(array("i")))
            for index in indexes[2:]:
                self._num_tokens -= len(index.tokens)
            del indexes[2:]
        text = indexes[0].tokens
        assert isinstance(text, array)
        text.extend(token_ids[-MAX_ANSWER:])
        text.append(SEPARATOR)
        self._num_tokens += min(len(token_ids), MAX_ANSWER) + 1
        self._texts.move_to_end(key)
        while self._num_tokens > MAX_TOKENS or len(self._texts) > MAX_KEYS:
            _, oldest = self._texts.popitem(last=False)
            self._num_tokens -= sum(len(index.tokens) for index in oldest)

    def indexes(self, key: Key, most: int = SLICE) -> Sequence[TokenIndex]:
        """The texts of a key, the newer one first, after up to ``most`` more tokens of it.

        Answers are not indexed before they are looked up, which may never happen.
        """
        indexes = self._texts.get(key, ())
        for index in indexes:
            if most > 0:
                most -= index.extend(most)
        return indexes
