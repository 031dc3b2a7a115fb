"""Families that cut an image and add the whole: Idefics 2 and 3, InternVL, Aya Vision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.vision.images import LOW_DETAIL_SIDE, ImageOptions, PromptPiece
from tgi_cli.vision.preprocessing.base import Prepared, Preprocessor, Setup, integer

if TYPE_CHECKING:
    from PIL import Image

_LONGEST_SIDE = 4096
"""Limit of transformers' Idefics 3 processor."""


_QUARTERED = 5
"""Parts of an image that Idefics 2 cuts: its quarters, and the whole."""


class Idefics2Preprocessor(Preprocessor):
    """Idefics 2: the quarters of an image, which may have other sizes than the whole."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        resampler = setup.config.get("perceiver_config")
        latents = resampler.get("resampler_n_latents") if isinstance(resampler, dict) else None
        self._rows = integer(latents, 64)
        own = self._rows * (_QUARTERED if self.processor.do_image_splitting else 1)
        self._splits = self._rows < own <= setup.max_rows
        self.set_limit(own if self._splits else self._rows, own)

    def largest_image(self) -> tuple[int, int]:
        """Every image takes the same number of rows."""
        return (self.processor.size.longest_edge,) * 2

    def prepare(self, image: Image.Image, options: ImageOptions) -> Prepared:
        """See :meth:`Preprocessor.prepare`."""
        splits = self._splits and not options.low_detail
        outputs = self.outputs(image, do_image_splitting=splits)
        values = self.values(np.asarray(outputs["pixel_values"]))
        tensors = {"pixel_values": values}
        mask = np.asarray(outputs["pixel_attention_mask"]).astype(bool)
        if not mask.all():
            values *= mask[:, :, None].astype(values.dtype)
            tensors["pixel_attention_mask"] = mask
        fake = PromptPiece(self.format.tokens["fake"])
        parts = _QUARTERED if splits else 1
        return Prepared(tensors, (*(fake, self.rows(self._rows)) * parts, fake))


class Idefics3Preprocessor(Preprocessor):
    """Idefics 3 and SmolVLM: tiles in rows and columns, each after a token for its place."""

    low_side = None

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._tile: int = self.processor.max_image_size["longest_edge"]
        longest = self.processor.size.longest_edge
        if not longest:
            raise UnsupportedModelError(
                "this model takes no images: its image processor's `size` has no `longest_edge`"
            )
        patch = integer(setup.vision.get("patch_size"), 32)
        scale = integer(setup.config.get("scale_factor"), 2)
        self._tile_rows: int = (self._tile // patch) ** 2 // scale**2
        self._longest: int = min(longest, _LONGEST_SIDE)
        own = self._most(math.ceil(self._longest / self._tile))
        side = math.ceil(self._longest / self._tile)
        while side > 1 and self._most(side) > setup.max_rows:
            side -= 1
            self._longest = side * self._tile
        self._side = side
        self.set_limit(self._most(side), own)

    def _most(self, side: int) -> int:
        """Rows of an image of ``side`` x ``side`` tiles."""
        split = side > 1 and self.processor.do_image_splitting
        return self._tile_rows * (side * side + 1 if split else 1)

    def largest_image(self) -> tuple[int, int]:
        """A square."""
        return (self._side * self._tile,) * 2

    def prepare(self, image: Image.Image, options: ImageOptions) -> Prepared:
        """See :meth:`Preprocessor.prepare`."""
        longest = self._longest
        if options.low_detail:
            # The processor enlarges images.
            longest = min(longest, self._tile * max(1, LOW_DETAIL_SIDE // self._tile))
        # Without padding, as all tiles have one size: masks would be larger than the pixels.
        outputs = self.outputs(
            image, size={"longest_edge": longest}, do_pad=False, return_row_col_info=True
        )
        rows, columns = outputs["rows"][0][0], outputs["cols"][0][0]
        pixels = self.values(np.asarray(outputs["pixel_values"]))
        return Prepared({"pixel_values": pixels}, tuple(self._pieces(rows, columns)))

    def _pieces(self, rows: int, columns: int) -> list[PromptPiece]:
        fake, whole = self.format.tokens["fake"], self.format.tokens["global"]
        tile = self.rows(self._tile_rows)
        pieces: list[PromptPiece] = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                pieces += (PromptPiece(f"{fake}<row_{row}_col_{column}>"), tile)
            pieces.append(PromptPiece("\n"))
        if rows:
            pieces.append(PromptPiece("\n"))
        return [*pieces, PromptPiece(fake + whole), tile, PromptPiece(fake)]


class InternVLPreprocessor(Preprocessor):
    """InternVL 3: the grid of at most twelve tiles whose shape is nearest to the image's."""

    low_side = None

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        if not hasattr(self.processor, "max_patches"):
            raise UnsupportedModelError(
                "this model takes no images: its image processor makes no tiles"
            )
        size, ratio = self.processor.size, self.downsampling(setup)
        patch = setup.vision.get("patch_size", 14)
        high, wide = patch if isinstance(patch, list) else (patch, patch)
        self._tile_rows = int((size.height // high) * (size.width // wide) * ratio**2)
        own = integer(self.processor.max_patches, 12)
        # The small copy is one more.
        self._tiles = max(1, min(own, setup.max_rows // self._tile_rows - 1))
        self.set_limit(self._most(self._tiles), self._most(own))

    @staticmethod
    def downsampling(setup: Setup) -> float:
        """Rows of a tile by its patches, along a side."""
        return float(setup.config.get("downsample_ratio", 0.5))

    def _most(self, tiles: int) -> int:
        return self._tile_rows * (tiles + 1 if tiles > 1 else 1)

    def largest_image(self) -> tuple[int, int]:
        """All tiles, as nearly square as their number allows."""
        tiles = self._tiles
        rows = next(n for n in range(math.isqrt(tiles), 0, -1) if tiles % n == 0)
        size = self.processor.size
        return tiles // rows * size.width, rows * size.height

    def prepare(self, image: Image.Image, options: ImageOptions) -> Prepared:
        """See :meth:`Preprocessor.prepare`."""
        tiles = self._tiles
        if options.low_detail:
            size = self.processor.size
            fitting = (LOW_DETAIL_SIDE // size.height) * (LOW_DETAIL_SIDE // size.width)
            tiles = min(tiles, max(1, fitting))
        fewest = min(integer(self.processor.min_patches, 1), tiles)
        outputs = self.outputs(image, crop_to_patches=True, min_patches=fewest, max_patches=tiles)
        pixels = np.asarray(outputs["pixel_values"])
        tokens = self.format.tokens
        pieces = (
            PromptPiece(tokens["start"]),
            *self.tiles(len(pixels), self._tile_rows),
            PromptPiece(tokens["end"]),
        )
        return Prepared({"pixel_values": self.values(pixels)}, pieces)

    def tiles(self, count: int, rows: int) -> Sequence[PromptPiece]:
        """What stands for so many tiles of ``rows`` each, the small copy being the last."""
        return (self.rows(count * rows),)


class AyaVisionPreprocessor(InternVLPreprocessor):
    """Aya Vision: InternVL's tiles, each after its number."""

    @staticmethod
    def downsampling(setup: Setup) -> float:
        """See :meth:`InternVLPreprocessor.downsampling`."""
        return 1 / integer(setup.config.get("downsample_factor"), 2)

    def tiles(self, count: int, rows: int) -> Sequence[PromptPiece]:
        """See :meth:`InternVLPreprocessor.tiles`."""
        tokens, tile = self.format.tokens, self.rows(rows)
        pieces: list[PromptPiece] = []
        for number in range(1, count):
            pieces += (PromptPiece(f"{tokens['tile']}_{number}"), tile)
        return (*pieces, PromptPiece(tokens["global"]), tile)
