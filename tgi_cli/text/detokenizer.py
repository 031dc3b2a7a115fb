"""Token ids to text, one id at a time, for one sequence."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from tgi_cli.text.tokenizer import Tokenizer

_CONTEXTS = (6, 24, 96)
"""Prompt ids that prime the decoder: what it may look back on (leading spaces, bytes). Longer
ones are tried only when the shorter begins within a character spelled in bytes."""

_MOST_PENDING = 32
"""Ids that may wait for a character to be complete. One has four bytes at most, so that more of
them are no text; decoding all that waits with each further id would cost its square."""
_TAIL = 3
"""Ids at the end of those that may still be the beginning of a character."""

REPLACEMENT = "\ufffd"


class Detokenizer:
    """The growing text of one sequence; special tokens add nothing to it.

    The pieces, joined, are what decoding the whole output behind its prompt gives. A piece is
    empty while a character's bytes are incomplete. The window method of
    :class:`tokenizers.decoders.DecodeStream` (0.7 us per id) decodes; this class adds the
    prompt's context, the flush, and recovery where a decoder rewrites text it gave before
    (byte fallback over invalid bytes).
    """

    __slots__ = ("_known", "_pending", "_special", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special_ids
        self._pending: list[int] = []
        self._prime(prompt_ids)

    def _prime(self, ids: Sequence[int]) -> None:
        for length in _CONTEXTS:
            known = [index for index in ids[-length:] if index not in self._special]
            if not known or not self._tokenizer.decode(known).endswith(REPLACEMENT):
                break
        else:
            # A context that ends within a character would be given out as text later.
            known = []
        self._known = known
        self._stream = DecodeStream(ids=list(known), skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        """The text that this id completes."""
        if token_id in self._special:
            return ""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:  # the library raises bare Exception when its prefix does not hold
            text = self._tokenizer.decode(self._pending)
            self._prime(self._pending)
            self._pending = []
            return text
        if not text:
            return self._settle() if len(self._pending) >= _MOST_PENDING else ""
        self._known = self._pending
        self._pending = []
        return text

    def _settle(self) -> str:
        """The text of what waits, but for an end that may yet become a character."""
        decode, pending = self._tokenizer.decode, self._pending
        whole = decode(pending)
        for cut in range(len(pending) - _TAIL, len(pending)):
            head, tail = pending[:cut], pending[cut:]
            text = decode(head)
            if text + decode(tail) == whole:
                break
        else:
            head, tail, text = pending, [], whole
        self._prime(head)
        self._pending = []
        return text + "".join(self.push(token_id) for token_id in tail)

    def flush(self) -> str:
        """The rest, when no more ids come: an incomplete character as U+FFFD."""
        if not self._pending:
            return ""
        before = self._tokenizer.decode(self._known)
        whole = self._tokenizer.decode(self._known + self._pending)
        pending, self._pending = self._pending, []
        return whole[len(before) :] if whole.startswith(before) else self._tokenizer.decode(pending)
