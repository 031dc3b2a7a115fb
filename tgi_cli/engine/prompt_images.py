"""The images of a prompt: their positions, the tokens that must share a chunk, and their hashes."""

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
"""What a block's hash has of a span: the image's digest, where the span begins in the block, its
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
        request: has at least one image, unless ``whole``.
        whole: whether all tokens of the prompt attend to each other, and are computed in one chunk.

    Attributes:
        inputs: the images.
        units: in order; an image each, unless the whole prompt is computed at once.
        end: prompt positions from here on need no image, and may be split.
        token_ids: ids of image tokens. They are never drafts.
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
        """The most tokens that must be computed in one chunk; 0 if all may be split."""
        return max((end - start for start, end in self._whole), default=0)

    @property
    def rows(self) -> tuple[RowImage, ...]:
        """The images as the worker needs them."""
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
        """The end of a chunk from ``begin``, moved from ``end`` so that it splits nothing.

        Args:
            begin, end: positions.
            most: the last position where it may end instead; None for no limit.
        """
        index = bisect_left(self._whole, end, key=lambda bounds: bounds[1])
        if index == len(self._whole):
            return end
        start, stop = self._whole[index]
        if not start < end < stop:
            return end
        return stop if most is None or stop <= most else max(start, begin)

    def drafts(self, token_ids: list[int]) -> list[int]:
        """The draft tokens before the first image token.

        Its id may not even be in the vocabulary.
        """
        for index, token_id in enumerate(token_ids):
            if token_id in self.token_ids:
                return token_ids[:index]
        return token_ids

    def content(self, begin: int, end: int) -> bytes:
        """A digest of what the KV of positions ``begin`` to ``end`` depends on beside token ids.

        Empty for text before, between and after images, as earlier blocks cover the images.
        Otherwise 16 bytes, which differ if an image differs, or its place in the block.
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
    """Check the positions of a request's images in its prompt. Raises ValueError."""
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
        raise ValueError("an image lies beyond the end of the prompt")
