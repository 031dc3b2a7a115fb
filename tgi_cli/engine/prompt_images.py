"""Where a prompt has images, what of it must not be parted, and what its hashes need of them."""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

from tgi_cli.engine.messages import GenerationRequest
from tgi_cli.engine.step import RowImage

DIGEST_BYTES = 32

_SPAN = struct.Struct("<32s6q?")
"""Of a block that a span touches: the image's digest, where the span begins in the block, its
length, its first row, the image's rows, its grid, and whether it is bidirectional."""


class RowSpan(NamedTuple):
    """A run of prompt positions ``start`` to ``end``, for rows of an image from ``first`` on."""

    start: int
    end: int
    image: int
    first: int


class ImageUnit(NamedTuple):
    """Images that are computed together, at prompt positions ``begin`` to ``end``."""

    begin: int
    end: int
    images: tuple[int, ...]


class PromptImages:
    """The images of a valid request, by the positions of its prompt.

    Args:
        request: with one image at least, unless its prompt is whole.
        whole: whether all tokens of the prompt see each other, and are computed in one chunk.

    Attributes:
        inputs: the images.
        units: in order; an image each, unless the whole prompt is computed at once.
        end: prompt positions from here on need no image, and may be parted.
        token_ids: ids that stand for images. They are never drafts.
    """

    def __init__(self, request: GenerationRequest, whole: bool = False) -> None:
        self.inputs = request.images
        self.spans: list[RowSpan] = []
        bounds: list[ImageUnit] = []
        for index, image in enumerate(self.inputs):
            first = 0
            for start, count in image.spans:
                self.spans.append(RowSpan(start, start + count, index, first))
                first += count
            bounds.append(ImageUnit(image.spans[0][0], self.spans[-1].end, (index,)))
        self._ends = [span.end for span in self.spans]
        self.token_ids = frozenset(request.prompt_ids[span.start] for span in self.spans)
        self._prompt = b""
        if whole:
            end = len(request.prompt_ids)
            self.units = [ImageUnit(0, end, tuple(range(len(self.inputs))))]
            self._whole = [(0, end)]
            ids = struct.pack(f"<{end}q", *request.prompt_ids)
            self._prompt = blake2b(ids + self._records(0, end), digest_size=16).digest()
        else:
            self.units = bounds
            self._whole = [
                (span.start, span.end)
                for span in self.spans
                if self.inputs[span.image].bidirectional
            ]
        self.end = self.units[-1].end

    @property
    def longest_whole(self) -> int:
        """The most tokens that must be computed in one chunk; 0 if any may be parted."""
        return max((end - start for start, end in self._whole), default=0)

    @property
    def rows(self) -> tuple[RowImage, ...]:
        """What the worker is to know of the images."""
        return tuple(
            RowImage(image.spans, image.grid, image.bidirectional) for image in self.inputs
        )

    def last_position(self, image: int) -> int:
        """The position of an image's last row."""
        start, count = self.inputs[image].spans[-1]
        return start + count - 1

    def units_from(self, position: int) -> Iterator[ImageUnit]:
        """The units that a sequence computed up to ``position`` has not passed, in order."""
        return (unit for unit in self.units if unit.end > position)

    def spans_between(self, begin: int, end: int) -> Iterator[RowSpan]:
        """The parts of spans at positions ``begin`` to ``end``."""
        for index in range(bisect_right(self._ends, begin), len(self.spans)):
            span = self.spans[index]
            if span.start >= end:
                return
            start = max(span.start, begin)
            first = span.first + start - span.start
            yield RowSpan(start, min(span.end, end), span.image, first)

    def fit(self, begin: int, end: int, most: int | None) -> int:
        """Where a chunk from ``begin`` that is to end at ``end`` parts nothing that is whole.

        Args:
            begin, end: positions.
            most: the farthest that it may end instead; None for no limit.
        """
        index = bisect_left(self._whole, end, key=lambda bounds: bounds[1])
        if index == len(self._whole):
            return end
        start, stop = self._whole[index]
        if not start < end < stop:
            return end
        return stop if most is None or stop <= most else max(start, begin)

    def drafts(self, token_ids: list[int]) -> list[int]:
        """The draft tokens before the first that stands for an image.

        Its id may not even be in the vocabulary.
        """
        for index, token_id in enumerate(token_ids):
            if token_id in self.token_ids:
                return token_ids[:index]
        return token_ids

    def content(self, begin: int, end: int) -> bytes:
        """What the KV of positions ``begin`` to ``end`` depends on beside their tokens.

        Empty where these and all before them show it: for text before, between and behind images.
        Otherwise 16 bytes, which differ where an image does, or its place in the block.
        """
        records = self._records(begin, end)
        if begin == 0:
            records = self._prompt + records
        return blake2b(records, digest_size=16, person=b"images").digest() if records else b""

    def _records(self, begin: int, end: int) -> bytes:
        records = []
        for index in range(bisect_right(self._ends, begin), len(self.spans)):
            span = self.spans[index]
            if span.start >= end:
                break
            image = self.inputs[span.image]
            height, width = image.grid or (0, 0)
            numbers = span.start - begin, span.end - span.start, span.first, image.num_rows
            records.append(_SPAN.pack(image.digest, *numbers, height, width, image.bidirectional))
        return b"".join(records)


def validate_images(request: GenerationRequest) -> None:
    """Check where the images of a request are in its prompt. Raises ValueError."""
    end = 0
    for number, image in enumerate(request.images, 1):
        if len(image.digest) != DIGEST_BYTES:
            raise ValueError(f"image {number} has a digest of {len(image.digest)} bytes")
        if not image.tensors:
            raise ValueError(f"image {number} has no tensors")
        if not image.spans:
            raise ValueError(f"image {number} has no place in the prompt")
        for start, count in image.spans:
            if count < 1 or start < end:
                raise ValueError(f"the positions of image {number} are not in order")
            end = start + count
        if image.grid is not None:
            height, width = image.grid
            if min(height, width) < 1 or height * width != image.num_rows:
                raise ValueError(
                    f"image {number} has {image.num_rows} rows, and a grid of {height} x {width}"
                )
            if len(image.spans) > 1:
                raise ValueError(f"image {number} has a grid, and more than one run of positions")
    if end > len(request.prompt_ids):
        raise ValueError("an image lies behind the end of the prompt")
