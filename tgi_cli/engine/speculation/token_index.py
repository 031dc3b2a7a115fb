"""Finds where the last tokens of a text have occurred before, and what followed them there.

Places are found by :mod:`tgi_cli.engine.speculation.hash_chains` and compared token by token. Of
the longest matches, the most frequent continuation wins, as in suffix decoding (Oliaro et al. 2024,
https://arxiv.org/abs/2411.04975), whose tree of all suffixes takes more memory and time.

Microseconds on one 2025 server core, with 32,000 tokens of text: indexing them 2,200, in slices of
220; a token more 1 to 1.6; a search that finds nothing 1.3, one place 2.4, eight 10; reading seven
tokens after one place 6, after eight 13.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tgi_cli.engine.speculation.hash_chains import LONGEST, HashChains

GRAMS = (LONGEST, 1)
"""Numbers of tokens that are hashed. The first finds matches of at least as many tokens."""

MAX_VISITS = 8
"""Places of a chain that a search compares: the latest ones."""

MAX_LENGTH = 32
"""Tokens that a search compares at the place that it likes best."""

SLICE = 4096
"""Tokens that one call of :meth:`TokenIndex.extend` indexes: a quarter of a millisecond."""

_FEW = 48
"""Tokens up to which indexing one by one is faster than all at once."""

_MIN_BITS, _MAX_BITS = 10, 16

SEPARATOR = -1
"""Separates texts within a text; nothing is read beyond it."""

LONG = 8
"""Length from which on matches are as good as longer ones."""

NEAR = 2
"""Tokens by which a match near an expected place counts as longer."""

_SHIFTS = (0, 1, 2, -1, 3, -2, 4, 5, 6, 7, 8)

_UNSEEN = 0.25
"""Votes for a token that was never seen at such a place."""


class TokenIndex:
    """The places where tokens occur in a text that grows.

    Args:
        tokens: the text. Call :meth:`extend` after appending to it; nothing is ever removed.
        open_end: whether drafts continue the text, as for a running sequence. Its last token is
            not indexed, since nothing follows it.
    """

    def __init__(self, tokens: Sequence[int], open_end: bool = False) -> None:
        self.tokens = tokens
        self._open_end = open_end
        self._begin(_bits_for(len(tokens)))

    def _begin(self, bits: int) -> None:
        """Index the text from its beginning, with tables of ``2 ** bits`` places."""
        self._size = 0
        self._bits = bits
        self._chains = [HashChains(n, bits) for n in GRAMS]

    @property
    def is_complete(self) -> bool:
        """Whether all tokens are indexed."""
        return self._size >= len(self.tokens) - self._open_end

    def extend(self, most: int = SLICE) -> int:
        """Index up to ``most`` of the tokens that are not indexed yet; returns how many."""
        tokens, begin = self.tokens, self._size
        end = min(len(tokens) - self._open_end, begin + most)
        if end <= begin:
            return 0
        if end > 2 << self._bits and self._bits < _MAX_BITS:
            # Chains have become long: index the text again, in slices.
            self._begin(_bits_for(len(tokens)))
            return self.extend(most)
        if end - begin <= _FEW:
            for chains in self._chains:
                chains.append(tokens, begin, end)
        else:
            first = max(0, begin - GRAMS[0] + 1)
            values = np.array(tokens[first:end], np.int64).astype(np.uint32)
            for chains in self._chains:
                chains.extend(values, first, begin)
        self._size = end
        return end - begin

    def find(
        self, context: Sequence[int], expected: int = -1, least: int = 1
    ) -> tuple[int, list[int]]:
        """Find the places after the longest matches of the last tokens of ``context``.

        Args:
            context: not empty. It may be the text itself.
            expected: place where an earlier match leads to, or -1. A match there, or else shortly
                before or after it, counts as longer by :data:`NEAR`: copies of texts with changes
                continue near to where they were.
            least: length below which matches are not looked for; some may be found nevertheless.

        Returns:
            The length of the longest match (0 for none), and the places
            of the tokens that follow such matches; of long matches, all of at least
            :data:`LONG` tokens. The most promising one comes first.
        """
        found = self._near(context, expected) if expected > 0 else []
        if not found or found[0][0] < LONG:
            # The second finds matches that are shorter than what the first hashes.
            for chains in self._chains[: 1 if least >= GRAMS[0] else 2]:
                found += self._visit(chains, context)
                if found:
                    break
        if not found:
            return 0, []
        enough = min(max(found)[0], LONG)
        places = list(dict.fromkeys(place for length, place in found if length >= enough))
        if enough < LONG:
            return enough, places
        return self._length(context, places[0] - 1, MAX_LENGTH), places

    def _visit(self, chains: HashChains, context: Sequence[int]) -> list[tuple[int, int]]:
        """Lengths of matches and the places after them, latest first."""
        found = []
        place, links = chains.last(context), chains.links
        for _ in range(MAX_VISITS):
            if place < 0:
                break
            length = self._length(context, place, LONG)
            if length:
                found.append((length, place + 1))
            place = links[place]
        return found

    def _near(self, context: Sequence[int], expected: int) -> list[tuple[int, int]]:
        """The match at an expected place, or else the longest near it, as :meth:`_visit` does."""
        longest, found, tokens, last, size = 0, expected, self.tokens, context[-1], self._size
        for shift in _SHIFTS:
            place = expected + shift
            if 0 < place <= size and tokens[place - 1] == last:
                length = self._length(context, place - 1, LONG)
                if length > longest:
                    longest, found = length, place
                    if not shift:
                        break
        return [(longest + NEAR, found)] if longest else []

    def _length(self, context: Sequence[int], place: int, most: int) -> int:
        """How many tokens up to ``place``, of ``most``, are the last ones of ``context``."""
        tokens, last = self.tokens, len(context) - 1
        most = min(most, place + 1, last + 1)
        length = 0
        while length < most and tokens[place - length] == context[last - length]:
            length += 1
        return length

    def follow(self, places: list[int], most: int) -> tuple[list[int], list[float]]:
        """Read on after ``places``, which vote for each token.

        Args:
            places: as :meth:`find` returns them.
            most: tokens.

        Returns:
            The tokens, and the share of the votes that each has got.
        """
        tokens, size, open_end = self.tokens, len(self.tokens), self._open_end
        chosen: list[int] = []
        shares: list[float] = []
        while len(chosen) < most:
            read = [
                tokens[place] if place < size else chosen[place - size] if open_end else SEPARATOR
                for place in places
            ]
            token = read[0] if len(read) == 1 else max(read, key=read.count)  # the first of equals
            if token == SEPARATOR:
                break
            chosen.append(token)
            shares.append(read.count(token) / (len(read) + _UNSEEN))
            places = [p + 1 for p, found in zip(places, read, strict=True) if found == token]
        return chosen, shares


def _bits_for(num_tokens: int) -> int:
    return min(_MAX_BITS, max(_MIN_BITS, num_tokens.bit_length()))
