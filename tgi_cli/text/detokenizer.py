"""Incremental detokenization of one sequence."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from tgi_cli.text.tokenizer import Tokenizer

_CONTEXTS = (6, 24, 96)
"""Numbers of prompt ids that prime the decoder (leading spaces, bytes). The next one is tried if
the last one ends within a character that is spelled in bytes."""

_MOST_PENDING = 32
"""Most ids that wait for a character to be complete. A character has four bytes at most, so that
more ids are not text; decoding all of them with each further id would take quadratic time."""
_TAIL = 3
"""Last pending ids that may still begin a character."""

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Decodes the tokens of one sequence one by one; special tokens add nothing.

    The joined pieces are the text of the whole output after its prompt. A piece is empty while
    the bytes of a character are incomplete. :class:`tokenizers.decoders.DecodeStream` decodes
    (0.7 us per id); this class adds the context of the prompt, the flush, and recovery where a
    decoder rewrites earlier text (byte fallback over invalid bytes).
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
            # A context that ends within a character would become output later.
            known = []
        self._known = known
        self._stream = DecodeStream(ids=list(known), skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        """Add a token. Returns the text that it completes."""
        if token_id in self._special:
            return ""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:  # the library raises bare Exception if earlier text changes
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
        """The text of the pending ids, except the last ones if they may become a character."""
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
        """End the text here, whatever follows; an incomplete character becomes U+FFFD."""
        if not self._pending:
            return ""
        before = self._tokenizer.decode(self._known)
        whole = self._tokenizer.decode(self._known + self._pending)
        pending, self._pending = self._pending, []
        self._prime(pending)
        return whole[len(before) :] if whole.startswith(before) else self._tokenizer.decode(pending)
