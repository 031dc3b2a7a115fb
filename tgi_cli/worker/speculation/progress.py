"""How far a draft model has computed the target's tokens, by row and by block.

A draft model need not follow the target at every step: while drafts do not pay, it falls behind,
and catches up later. Blocks go from row to row (shared prefixes, preemption, copies), so each has a
count of its own: how many of its leading tokens the draft model has computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class DraftProgress:
    """Counts of leading tokens whose keys and values are those of the row's tokens.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._of_row: Ints = np.zeros(0, np.int64)
        self._of_block: Ints = np.zeros(0, np.int64)
        self._new = np.zeros(0, np.bool_)

    def allocate(self, num_blocks: int, max_rows: int) -> None:
        """Begin again, with empty caches."""
        self._of_row = np.zeros(max_rows, np.int64)
        self._of_block = np.zeros(num_blocks, np.int64)
        self._new = np.zeros(max_rows, np.bool_)

    def forget(self) -> None:
        """Consider nothing computed."""
        self._of_row[:] = 0
        self._of_block[:] = 0

    def apply(self, new_rows: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        """Note that ``new_rows`` have other sequences, and that blocks were copied."""
        for source, destination in copies:
            self._of_block[destination] = self._of_block[source]
        self._new[list(new_rows)] = True

    def follow(self, rows: Ints, starts: Ints, ends: Ints, tables: NDArray[np.int32]) -> None:
        """The target has computed positions ``starts`` to ``ends`` (exclusive) of ``rows``.

        What it has written there is new: of the blocks that begin there, nothing was computed, and
        of those that it continues, nothing after the first of these tokens, which was chosen by an
        earlier step, and perhaps computed then.

        Args:
            rows, starts, ends: int64 [E].
            tables: the blocks of all rows.
        """
        size = self._size
        # Few entries enter a block in a step: the others are done with one comparison.
        entering = (starts % size == 0) | (starts // size != (ends - 1) // size) | self._new[rows]
        for entry in np.flatnonzero(entering):
            row, start, end = rows[entry], int(starts[entry]), int(ends[entry])
            begun = tables[row, -(-start // size) : -(-end // size)]
            self._of_block[begun] = 0
            if self._new[row]:
                self._new[row] = False
                self._begin(row, start, tables[row])
        known = starts + 1
        # Where other tokens were forced than a step had chosen, fewer are left.
        for entry in np.flatnonzero(self._of_row[rows] > known):
            block = tables[rows[entry], known[entry] // size]
            self._of_block[block] = min(self._of_block[block], known[entry] % size)
            self._of_row[rows[entry]] = known[entry]

    def _begin(self, row: int, start: int, table: NDArray[np.int32]) -> None:
        """A sequence that starts after ``start`` cached tokens has taken the row."""
        blocks = table[: -(-start // self._size)]
        if start % self._size:  # a copy, which may have more of another sequence
            self._of_block[blocks[-1]] = min(self._of_block[blocks[-1]], start % self._size)
        held = self._of_block[blocks]
        short = np.flatnonzero(held < self._size)
        whole = int(short[0]) if len(short) else len(blocks)
        more = int(held[whole]) if len(short) else 0
        self._of_row[row] = min(start, whole * self._size + more)

    def computed(self, rows: Ints) -> Ints:
        """Leading tokens of each row that need not be computed, int64 [E]."""
        return self._of_row[rows]

    def advance(self, row: int, begin: int, end: int, table: NDArray[np.int32]) -> None:
        """The tokens ``begin`` to ``end`` (exclusive) of a row have been computed in its blocks."""
        self._of_row[row] = end
        blocks = np.arange(begin // self._size, -(-end // self._size))
        self._of_block[table[blocks]] = np.minimum(self._size, end - blocks * self._size)
