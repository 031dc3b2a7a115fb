"""The answers that a server gave lately, as a text to look drafts up in.

Requests of one tenant, salt and adapter share it; those of different ones do not, for what others
were answered shows in how fast a request is.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from tgi_cli.engine.speculation.token_index import SEPARATOR, TokenIndex


class Key(NamedTuple):
    """Whose answers: see :class:`tgi_cli.engine.messages.GenerationRequest`."""

    tenant: bytes
    cache_salt: bytes
    adapter_id: int


MAX_TOKENS = 1 << 18
"""Limit of tokens over all keys, which take 4 MB."""

MAX_KEYS = 256
"""Each takes 16 KB and more."""

TEXT_TOKENS = 1 << 14
"""Length from which on the text of a key is closed. There are two: as the new one becomes full, the
old one is dropped."""

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
        """Take in an answer."""
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
        while indexes[0].extend():
            pass
        self._texts.move_to_end(key)
        while self._num_tokens > MAX_TOKENS or len(self._texts) > MAX_KEYS:
            _, oldest = self._texts.popitem(last=False)
            self._num_tokens -= sum(len(index.tokens) for index in oldest)

    def indexes(self, key: Key) -> Sequence[TokenIndex]:
        """The texts of a key, the newer one first."""
        return self._texts.get(key, ())
