"""Families that keep an image's shape: Pixtral and Mistral 3, LightOnOCR, Gemma 4."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.vision.images import LOW_DETAIL_SIDE, ImageOptions, PromptPiece
from tgi_cli.vision.preprocessing.base import (
    Prepared,
    Preprocessor,
    Setup,
    integer,
    largest_rectangle,
)

if TYPE_CHECKING:
    from PIL import Image

_SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""What transformers' Gemma 4 processor accepts."""


class PixtralPreprocessor(Preprocessor):
    """Pixtral and Mistral 3: a row for each patch, and a token after each line of patches."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        merges = setup.config.get("model_type") in ("mistral3", "lighton_ocr")
        merge = integer(setup.config.get("spatial_merge_size"), 2 if merges else 1)
        self._block = integer(setup.vision.get("patch_size"), 16) * merge
        self._patch = self.patch()
        size = self.processor.size
        self._longest: int = size.longest_edge or min(size.height or 0, size.width or 0)
        if self._longest < self._patch:
            raise UnsupportedModelError(
                "this model takes no images: its image processor has no `longest_edge`"
            )
        self._cap = setup.max_rows
        own = (math.ceil(self._longest / self._patch) * self._patch // self._block) ** 2
        self.set_limit(min(own, self._cap), own)

    def patch(self) -> int:
        """What the sides of a preprocessed image are multiples of, in pixels."""
        return self._block

    def largest_image(self) -> tuple[int, int]:
        """Whole blocks, so that it is not scaled."""
        side = self._longest // self._block
        height, width = largest_rectangle(self.max_rows, side)
        return width * self._block, height * self._block

    def _grid(self, height: int, width: int, longest: int) -> tuple[int, int]:
        """Rows, from top to bottom and from left to right, if no side is longer."""
        ratio = max(height, width) / longest
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        patches = ((side - 1) // self._patch + 1 for side in (height, width))
        down, across = (count * self._patch // self._block for count in patches)
        return down, across

    def _longest_side(self, height: int, width: int) -> int:
        # What is longer than the image makes no difference, and may be any number.
        spare = max(0, self._longest - max(height, width)) // self._patch
        longest = self._longest - spare * self._patch
        while longest > self._patch and math.prod(self._grid(height, width, longest)) > self._cap:
            longest -= self._patch
        return max(longest, self._patch)

    def prepare(self, image: Image.Image, options: ImageOptions) -> Prepared:
        """See :meth:`Preprocessor.prepare`."""
        longest = self._longest_side(image.height, image.width)
        outputs = self.outputs(image, size={"longest_edge": longest}, patch_size=self._patch)
        pixels = np.asarray(outputs["pixel_values"])
        sides = pixels.shape[-2:]
        height, width = (side // self._block for side in sides)
        if not height * width:
            raise ValueError("the image is smaller than a row")
        tensors = {"pixel_values": self.values(pixels), "image_sizes": np.array([sides], np.int64)}
        return Prepared(tensors, self.lines(height, width))

    def lines(self, height: int, width: int) -> tuple[PromptPiece, ...]:
        """What stands for so many lines of rows."""
        gap, end = (PromptPiece(self.format.tokens[name]) for name in ("break", "end"))
        lines = [self.rows(width), gap] * height
        lines[-1] = end
        return tuple(lines)


class LightOnOcrPreprocessor(PixtralPreprocessor):
    """LightOnOCR: Pixtral's, without tokens between lines; a row may be cut off at the edges."""

    def patch(self) -> int:
        """See :meth:`PixtralPreprocessor.patch`."""
        size = self.processor.patch_size
        return integer(size if isinstance(size, int) else size["height"], 16)

    def lines(self, height: int, width: int) -> tuple[PromptPiece, ...]:
        """See :meth:`PixtralPreprocessor.lines`."""
        return (self.rows(height * width),)


class Gemma4Preprocessor(Preprocessor):
    """Gemma 4: scaled to a number of blocks of patches, a row for each block."""

    low_side = None

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        processor = self.processor
        self._block: int = processor.patch_size * processor.pooling_kernel_size
        self._rows = _at_most(min(processor.max_soft_tokens, setup.max_rows))
        # In transformers, in layers with a sliding window alone.
        self.bidirectional = setup.text.get("use_bidirectional_attention") == "vision"
        self.set_limit(self._rows, processor.max_soft_tokens)

    def largest_image(self) -> tuple[int, int]:
        """Whole blocks, so that it is not scaled."""
        height, width = largest_rectangle(self.max_rows)
        return width * self._block, height * self._block

    def prepare(self, image: Image.Image, options: ImageOptions) -> Prepared:
        """See :meth:`Preprocessor.prepare`."""
        rows = self._rows
        if options.low_detail:
            # The processor enlarges images.
            rows = min(rows, _at_most((LOW_DETAIL_SIDE // self._block) ** 2))
        outputs = self.outputs(image, max_soft_tokens=rows)
        pixels = np.asarray(outputs["pixel_values"])
        positions = np.asarray(outputs["image_position_ids"], np.int64)
        patches = pixels.reshape(*pixels.shape[:-1], -1, 3)  # channels are last
        values = self.values(patches, -1).reshape(pixels.shape)
        values[positions[..., 0] < 0] = 0  # padding
        tokens = self.format.tokens
        pieces = (
            PromptPiece(tokens["start"]),
            self.rows(int(outputs["num_soft_tokens_per_image"][0])),
            PromptPiece(tokens["end"]),
        )
        return Prepared({"pixel_values": values, "image_position_ids": positions}, pieces)


def _at_most(rows: int) -> int:
    return max((tokens for tokens in _SOFT_TOKENS if tokens <= rows), default=_SOFT_TOKENS[0])
