"""How images change a row's positions, and which tokens attend to which.

Positions on three axes (Qwen2-VL, https://arxiv.org/abs/2409.12191, section 2.1): all tokens of an
image have the position p at which it begins, and on the axes of height and width their row and
column are added. Text goes on after the larger number of rows or columns, with the same position
on each axis. So after the images of a prompt, a sequence's positions are its tokens' own with one
number added, the row's shift, which is all that decodes need. KV slots and token ids remain where
the tokens are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_cli.engine.step import NewRow, RowImage, Step

_Ints = NDArray[np.int64]


class ImagePositions:
    """Positions of tokens and images in all rows of the persistent batch.

    Args:
        max_rows: number of rows of the batch.
        axes: axes of the model's positions, 1 or 3.
        spans: whether the tokens of an image may attend to each other.
        whole_prompts: whether all tokens of a prompt do.

    Attributes:
        shifts: int64 [max_rows], what is added to positions after a row's images.
    """

    def __init__(
        self, max_rows: int, axes: int = 1, spans: bool = False, whole_prompts: bool = False
    ) -> None:
        self.shifts: _Ints = np.zeros(max_rows, np.int64)
        self._axes = axes
        self._spans = spans
        self._whole_prompts = whole_prompts
        self._within: dict[int, _Ints] = {}
        """By row, int64 [3, n]: positions up to the end of its last image."""
        self._until: dict[int, NDArray[np.int32]] = {}
        """By row, int32 [n], up to its last span's end: see AttentionMetadata.visible_until."""

    @property
    def shifted(self) -> bool:
        """Whether any row may have a shift."""
        return bool(self._within)

    @property
    def empty(self) -> bool:
        """Whether no row has images."""
        return not (self._within or self._until)

    def free(self, row: int) -> None:
        """Forget a row."""
        self._until.pop(row, None)
        if self._within.pop(row, None) is not None:
            self.shifts[row] = 0

    def put(self, new: NewRow) -> None:
        """Add a new row.

        Raises:
            ValueError: an image is not a grid of as many tokens as it has, in one span.
        """
        self.free(new.row)
        if self._axes == 3 and new.images:
            within = image_positions(new.images)
            self._within[new.row] = within
            self.shifts[new.row] = within[:, -1].max() + 1 - within.shape[1]
        if self._whole_prompts:
            count = new.prompt_tokens
            self._until[new.row] = np.full(count, count - 1, np.int32)
        elif self._spans:
            spans = [span for image in new.images if image.bidirectional for span in image.spans]
            if spans:
                self._until[new.row] = span_ends(spans)

    def plain(self, step: Step) -> bool:
        """Whether the step has no tokens in spans, and positions on one axis."""
        if self.empty:
            return True
        return next(_parts(step, self._until), None) is None and all(
            bool((part == part[0]).all()) for _, part in _parts(step, self._within)
        )

    def rope(self, step: Step, rows: _Ints, positions: _Ints) -> _Ints:
        """Positions for rotary embedding.

        Args:
            step: with T tokens.
            rows, positions: int64 [T], of its tokens.

        Returns:
            int64 [T], or [3, T] if a token's three positions differ.
        """
        if not self._within:
            return positions
        shifted = positions + self.shifts[rows]
        parts = list(_parts(step, self._within))
        if any((part != part[0]).any() for _, part in parts):
            shifted = np.broadcast_to(shifted, (3, len(shifted))).copy()
        for begin, part in parts:
            shifted[..., begin : begin + part.shape[1]] = part if shifted.ndim == 2 else part[0]
        return shifted

    def visible_until(self, step: Step) -> NDArray[np.int32] | None:
        """int32 [T]: see :class:`tgi_cli.attention.AttentionMetadata`; None without spans.

        Raises:
            ValueError: the step ends within a span.
        """
        if not self._until:
            return None
        until: NDArray[np.int32] | None = None
        ends = np.array(step.starts, np.int64) + np.array(step.counts, np.int64)
        for begin, part in _parts(step, self._until):
            if until is None:
                until = np.full(step.num_tokens, -1, np.int32)
            until[begin : begin + len(part)] = part
        if until is not None and (until >= np.repeat(ends, step.counts)).any():
            raise ValueError("a step ends within tokens that attend to each other")
        return None if until is None or until.max() < 0 else until


def _parts(step: Step, tables: Mapping[int, NDArray[Any]]) -> Iterator[tuple[int, NDArray[Any]]]:
    """For each entry that begins within its row's table: its first token, and its part of that."""
    begin = 0
    for row, start, count in zip(step.rows, step.starts, step.counts, strict=True):
        table = tables.get(row)
        if table is not None and start < table.shape[-1]:
            yield begin, table[..., start : start + count]
        begin += count


def image_positions(images: tuple[RowImage, ...]) -> _Ints:
    """int64 [3, n]: positions on three axes up to the end of the last image.

    Raises:
        ValueError: as :meth:`ImagePositions.put`.
    """
    parts: list[_Ints] = []
    token = position = 0
    for image in images:
        if image.grid is None or len(image.spans) != 1:
            raise ValueError("an image without a grid has no positions on three axes")
        (start, count), (height, width) = image.spans[0], image.grid
        if count != height * width:
            raise ValueError(f"an image of {height} x {width} rows stands for {count} tokens")
        text = np.arange(position, position + start - token)
        position += start - token
        parts.append(np.broadcast_to(text, (3, len(text))))
        rows, columns = np.divmod(np.arange(count), width)
        parts.append(np.stack((np.zeros_like(rows), rows, columns)) + position)
        token, position = start + count, position + max(height, width)
    return np.concatenate(parts, axis=1)


def span_ends(spans: list[tuple[int, int]]) -> NDArray[np.int32]:
    """int32 [n]: the last position of the span of each token, or -1, up to the last span's end."""
    until = np.full(max(start + count for start, count in spans), -1, np.int32)
    for start, count in spans:
        until[start : start + count] = start + count - 1
    return until
