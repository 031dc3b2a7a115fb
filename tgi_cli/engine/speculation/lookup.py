"""Drafts that are looked up in texts, without weights.

An answer that repeats a text (code that it edits, a document that it quotes, itself) continues as
that text does. Prompt lookup (https://github.com/apoorvumang/prompt-lookup-decoding) and vLLM's
n-gram and suffix methods do the same with the prompt and the answer.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from tgi_cli.engine.draft_source import DraftSource
from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.speculation.drafter import Draft
from tgi_cli.engine.speculation.hash_chains import LONGEST
from tgi_cli.engine.speculation.recent_answers import Key, RecentAnswers
from tgi_cli.engine.speculation.token_index import LONG, SLICE, TokenIndex


@dataclass(slots=True)
class _Reader:
    """Where one sequence reads in one text.

    Attributes:
        behind: the place after its latest match there, or -1.
        at: the number of its tokens at that match.
    """

    index: TokenIndex
    source: DraftSource
    behind: int = -1
    at: int = 0

    def draft(self, tokens: list[int], most: int, least: int = 1) -> Draft | None:
        """Up to ``most`` drafts after a match of ``least`` tokens, see :meth:`TokenIndex.find`."""
        index, count = self.index, len(tokens)
        expected = self.behind + count - self.at if self.behind >= 0 else -1
        # An answer is expected to begin as its prediction does.
        length, places = index.find(tokens, expected, least) if expected else (LONG, [0])
        if not length:
            return None
        self.behind, self.at = places[0], count
        token_ids, shares = index.follow(places, most)
        return Draft(self.source, length, token_ids, shares) if token_ids else None


class LookupDrafter:
    """Looks drafts up in a request's prediction, in its own tokens and in recent answers.

    Args:
        shares_answers: whether requests of the same tenant, salt and adapter profit from each
            other's answers.
    """

    def __init__(self, shares_answers: bool = True) -> None:
        self._recent = RecentAnswers() if shares_answers else None
        self._readers: dict[int, list[_Reader]] = {}

    def draft(self, sequence: Sequence, most: int) -> Draft | None:
        """See the protocol. Texts are indexed in slices, which calls share: see :data:`SLICE`."""
        tokens = sequence.token_ids
        readers = self._readers.get(sequence.request.request_id)
        if readers is None:
            readers = self._readers[sequence.request.request_id] = _readers_of(sequence)
        left = SLICE
        best: Draft | None = None
        for reader in readers:
            if left > 0:
                left -= reader.index.extend(left)
            best = _better(best, reader.draft(tokens, most))
        if self._recent is not None and (best is None or best.length < LONG):
            # A match of a token or two elsewhere is worth less than one here.
            least = 1 if best is None else LONGEST
            for index in self._recent.indexes(_key_of(sequence), left):
                found = _Reader(index, DraftSource.RECENT).draft(tokens, most, least)
                if found is not None and (best is None or found.length > best.length):
                    best = found
        return best

    def finish(self, sequence: Sequence) -> None:
        """See the protocol. Keeps the answer for other requests."""
        self._readers.pop(sequence.request.request_id, None)
        if self._recent is not None:
            answer = sequence.token_ids[sequence.prompt_tokens :]
            self._recent.add(_key_of(sequence), answer)


def _readers_of(sequence: Sequence) -> list[_Reader]:
    readers = [_Reader(TokenIndex(sequence.token_ids, open_end=True), DraftSource.CONTEXT)]
    prediction = sequence.request.prediction
    if prediction:
        text = TokenIndex(array("i", prediction))
        readers.insert(0, _Reader(text, DraftSource.PREDICTION, 0, sequence.prompt_tokens))
    return readers


def _key_of(sequence: Sequence) -> Key:
    request = sequence.request
    return Key(request.tenant, request.cache_salt, request.adapter_id)


def _better(one: Draft | None, other: Draft | None) -> Draft | None:
    """The draft with the longer match; the first if they are equal."""
    if one is None or (other is not None and other.length > one.length):
        return other
    return one


class GrammarDrafter:
    """Drafts tokens that a grammar forces but that must be sampled."""

    def draft(self, sequence: Sequence, most: int) -> Draft | None:
        """See the protocol. A look-up takes 1.4 us, for requests with a grammar only."""
        matcher = sequence.matcher
        if matcher is None or sequence.skip_forced or matcher.stopped:
            return None
        forced = matcher.forced()[:most]
        return Draft(DraftSource.GRAMMAR, 1, forced, [1.0] * len(forced)) if forced else None

    def finish(self, sequence: Sequence) -> None:
        """See the protocol."""
