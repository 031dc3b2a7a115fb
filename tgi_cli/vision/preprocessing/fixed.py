"""Families whose images have one size: LLaVA 1.5, Gemma 3, PaliGemma, DeepSeek-VL, Janus."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tgi_cli.vision.images import ImageOptions, PromptPiece
from tgi_cli.vision.model_formats import llava_tower
from tgi_cli.vision.preprocessing.base import Prepared, Preprocessor, Setup, integer

if TYPE_CHECKING:
    from PIL import Image

_LONGEST_RATIO = 200
"""Limit of the ratio of the sides where the shorter one is scaled to a fixed length: otherwise an
image could take gigabytes. Qwen2-VL's limit."""


class FixedPreprocessor(Preprocessor):
    """One tile of one size for every image."""

    low_side = None  # it would cost as many tokens
    size: tuple[int, int]
    """Width and height of the tile in pixels."""

    def largest_image(self) -> tuple[int, int]:
        """Every image takes the same number of rows."""
        return self.size

    def variant(self, options: ImageOptions) -> tuple[Any, ...]:
        """No option changes anything."""
        return ()


class LlavaPreprocessor(FixedPreprocessor):
    """LLaVA 1.5: a row for each patch."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._tower = TowerRows(setup)
        crop = self.processor.crop_size if self.processor.do_center_crop else self.processor.size
        height = crop.height or crop.shortest_edge
        self.size = (crop.width or height, height)
        rows = self._tower.rows(height, self.size[0])
        self.set_limit(rows, rows)

    def prepare(self, image: Image.Image, options: ImageOptions) -> Prepared:
        """See :meth:`Preprocessor.prepare`."""
        if max(image.size) > _LONGEST_RATIO * min(image.size):
            raise ValueError("the image is too long")
        pixels = np.asarray(self.outputs(image)["pixel_values"])
        pieces = (self.rows(self._tower.rows(*pixels.shape[-2:])),)
        return Prepared({"pixel_values": self.values(pixels)}, pieces)


class TowerRows:
    """How many rows LLaVA's encoders make of a tile: of its patches, and of a class token."""

    def __init__(self, setup: Setup) -> None:
        tower = llava_tower(setup.config)
        if tower is None:
            raise ValueError("unknown image encoder")
        self.patch = integer(setup.vision.get("patch_size"), tower.patch)
        selected = setup.config.get("vision_feature_select_strategy", tower.strategy)
        self._beside: int = tower.class_tokens - (selected == "default")

    def rows(self, height: int, width: int) -> int:
        """Rows of a tile of this size in pixels."""
        return (height // self.patch) * (width // self.patch) + self._beside


class Gemma3Preprocessor(FixedPreprocessor):
    """Gemma 3: the image is squeezed into a square; pan-and-scan is off, as in transformers."""

    bidirectional = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.size = (self.processor.size.width, self.processor.size.height)
        self._rows = integer(setup.config.get("mm_tokens_per_image"), 256)
        self.set_limit(self._rows, self._rows)

    def prepare(self, image: Image.Image, options: ImageOptions) -> Prepared:
        """See :meth:`Preprocessor.prepare`."""
        pixels = np.asarray(self.outputs(image, do_pan_and_scan=False)["pixel_values"])
        tokens = self.format.tokens
        pieces = (
            PromptPiece("\n\n" + tokens["start"]),
            self.rows(self._rows),
            PromptPiece(tokens["end"] + "\n\n"),
        )
        return Prepared({"pixel_values": self.values(pixels)}, pieces)


class SquarePreprocessor(FixedPreprocessor):
    """DeepSeek-VL: the image is padded to a square, a row for each of its patches."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.size = (self.processor.size.width, self.processor.size.height)
        patch = integer(setup.vision.get("patch_size"), 16)
        self._rows = (self.size[0] // patch) * (self.size[1] // patch)
        self.set_limit(self._rows, self._rows)

    def prepare(self, image: Image.Image, options: ImageOptions) -> Prepared:
        """See :meth:`Preprocessor.prepare`."""
        pixels = np.asarray(self.outputs(image)["pixel_values"])
        return Prepared({"pixel_values": self.values(pixels)}, (self.rows(self._rows),))


class JanusPreprocessor(SquarePreprocessor):
    """Janus: as DeepSeek-VL, with a token before an image and one behind it."""

    def prepare(self, image: Image.Image, options: ImageOptions) -> Prepared:
        """See :meth:`Preprocessor.prepare`."""
        prepared = super().prepare(image, options)
        start, end = (PromptPiece(self.format.tokens[name]) for name in ("start", "end"))
        return replace(prepared, pieces=(start, *prepared.pieces, end))


class PaliGemmaPreprocessor(SquarePreprocessor):
    """PaliGemma: the image is squeezed into a square."""

    bidirectional = True
