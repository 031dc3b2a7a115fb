"""Hash chains over a text of tokens: earlier places of the same few tokens.

The structure of LZ77 compressors (RFC 1951, section 4): a table from the hash of n tokens to the
last place where such tokens ended, and for each place the previous one with the same hash. It
takes 4 bytes per token and a table that is as long as the text, 256 KiB at most. Different tokens
may have the same hash: callers compare them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LONGEST = 3
"""Most tokens that are hashed together."""

_FACTORS = (0x9E3779B1, 0xB5297A4D, 0x68E31DA5)
"""Odd constants of multiplicative hashing (Knuth, The Art of Computer Programming 3, 6.4)."""

_32_BITS = 0xFFFFFFFF


class HashChains:
    """The places where ``n`` tokens of the same hash end, each with the one before it.

    Attributes:
        links: for each place the one before it, or -1.
    """

    __slots__ = ("_heads", "_n", "_shift", "links")

    def __init__(self, n: int, bits: int) -> None:
        self._n = n
        self._shift = 32 - bits
        self._heads = array("i", [-1]) * (1 << bits)
        self.links = array("i")

    def last(self, context: Sequence[int]) -> int:
        """The last place where a hash as that of the last tokens of ``context`` ends, or -1."""
        if len(context) < self._n:
            return -1
        return self._heads[self._hash(context, len(context) - 1)]

    def append(self, tokens: Sequence[int], begin: int, end: int) -> None:
        """Add the next places, from ``begin`` to ``end``, one by one."""
        n, shift, heads, add = self._n, self._shift, self._heads, self.links.append
        first, others = _FACTORS[0], tuple(enumerate(_FACTORS))[1:n]
        for place in range(begin, end):
            if place < n - 1:
                add(-1)
                continue
            value = tokens[place] * first
            for back, factor in others:
                value ^= tokens[place - back] * factor
            key = (value & _32_BITS) >> shift
            add(heads[key])
            heads[key] = place

    def _hash(self, tokens: Sequence[int], place: int) -> int:
        value = 0
        for back in range(self._n):
            value ^= tokens[place - back] * _FACTORS[back]
        return (value & _32_BITS) >> self._shift

    def extend(self, values: NDArray[np.uint32], first: int, begin: int) -> None:
        """Add the places from ``begin`` to the end of ``values``, the tokens from ``first`` on.

        ``first`` is ``n - 1`` places before ``begin`` at least, or 0.
        """
        end = first + len(values)
        start = max(begin, self._n - 1)
        for _ in range(begin, min(start, end)):
            self.links.append(-1)
        if start >= end:
            return
        keys = np.zeros(end - start, np.uint32)
        for back in range(self._n):
            keys ^= values[start - back - first : end - back - first] * np.uint32(_FACTORS[back])
        keys = (keys >> np.uint32(self._shift)).astype(np.uint16)
        heads = np.frombuffer(self._heads, np.int32)
        links = heads[keys]
        order = np.argsort(keys, kind="stable")  # a radix sort, for 16 bits
        ordered = keys[order]
        again = np.flatnonzero(ordered[1:] == ordered[:-1])
        links[order[again + 1]] = start + order[again]
        final = np.ones(len(keys), np.bool_)
        final[again] = False
        heads[ordered[final]] = start + order[final]
        self.links.frombytes(links.tobytes())
