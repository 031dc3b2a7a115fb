"""A model's special tokens in grammars of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from llguidance import LLTokenizer


class SpecialTokens:
    """The added tokens of a model.

    Args:
        added: Id of each added token.
        special: The special ones.
        ends: Ids that end a text.
    """

    def __init__(
        self, added: Mapping[str, int], special: Sequence[str] = (), ends: Sequence[int] = ()
    ) -> None:
        self.ids = dict(added)
        self._special = frozenset(special)
        self._ends = frozenset(ends)
        names = sorted(self.ids, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    def literal(self, text: str) -> str:
        """Lark for a text; added tokens in it may be single tokens."""
        parts = self._split.split(text) if self._split is not None else [text]
        terms = [self._token(part) if part in self.ids else quoted(part) for part in parts if part]
        return " ".join(terms) or '""'

    def _token(self, name: str) -> str:
        token = f"<[{self.ids[name]}]>"
        # The tokenizer may or may not encode the text of a normal added token as that token.
        return token if name in self._special else f"({token} | {quoted(name)})"

    def first(self, text: str) -> tuple[str | None, str]:
        """Lark for the token at the beginning of a text, or None, and the rest of the text."""
        name = next(filter(None, self._split.split(text, maxsplit=1)), "") if self._split else ""
        return (f"<[{self.ids[name]}]>", text[len(name) :]) if name in self.ids else (None, text)

    def inner(self, text: str) -> tuple[str, str, str] | None:
        """A text around the first added token in it: before, Lark for the token, after.

        None if it has none, or begins with one.
        """
        parts = self._split.split(text, maxsplit=1) if self._split is not None else [text]
        if len(parts) < 3 or not parts[0]:
            return None
        before, name, behind = parts
        return before, f"<[{self.ids[name]}]>", behind

    def others(self, texts: Sequence[str]) -> str:
        """Lark for any added token except ``texts``, tokens in them, and the ends.

        Empty if there is none. A token that a text begins with is not in it: others may follow.
        """
        named = {*texts, *(name for name in self.ids if any(map(self._within(name), texts)))}
        ids = {i for name, i in self.ids.items() if name not in named} - self._ends
        return f"<[{','.join(map(str, sorted(ids)))}]>" if ids else ""

    def _within(self, name: str) -> Callable[[str], bool]:
        return lambda text: text.find(name) > 0 and self.inner(text) is not None

    def tokenizer(self) -> LLTokenizer:
        """A vocabulary of all bytes and the added tokens with their own ids."""
        return LLTokenizer(self._bytes(), slices=[])  # type: ignore[arg-type]

    def letter_ids(self) -> list[int]:
        """The token of each byte in :meth:`tokenizer`."""
        return self._bytes().letter_ids

    def _bytes(self) -> _Bytes:
        return _Bytes(self.ids, min(self._ends, default=None))


class _Bytes:
    """A tokenizer for llguidance; see its ``TokenizerWrapper``."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, special: Mapping[str, int], end: int | None) -> None:
        by_id = {index: name.encode() for name, index in special.items()}
        if end is None or end not in by_id:
            end = max(by_id, default=-1) + 1
            by_id[end] = b"<end>"
        self.eos_token_id = end
        self.special_token_ids = sorted(by_id)
        size = max(max(by_id) + 1, 256 + len(by_id))
        self.letter_ids = [i for i in range(size) if i not in by_id][:256]
        self.tokens = [by_id.get(i, b"") for i in range(size)]
        for letter, i in enumerate(self.letter_ids):
            self.tokens[i] = bytes([letter])

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.encode() if isinstance(text, str) else text
        return [self.letter_ids[letter] for letter in text]


def quoted(text: str) -> str:
    """A string literal of Lark."""
    return json.dumps(text, ensure_ascii=False)
