"""LLaVA-NeXT and LLaVA-OneVision: the whole image, and tiles of it without their padding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.vision.images import ImageOptions
from tgi_cli.vision.preprocessing.base import Prepared, Preprocessor, Setup, scaled, shrunk
from tgi_cli.vision.preprocessing.fixed import TowerRows

if TYPE_CHECKING:
    from PIL import Image

_LONGEST_SQUARE = 4096
"""Longest side of an image that is padded to a square: 50 MB."""


class LlavaNextPreprocessor(Preprocessor):
    """LLaVA-NeXT: tiles of the resolution, of a list, that fits the image best.

    The encoder returns a row for each patch of the whole image, for each patch of the tiles that
    shows a part of the image, and for each line of the latter.
    """

    _most_tiles: float = math.inf

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        size, crop = self.processor.size, self.processor.crop_size
        self._tile: int = (crop.height if crop else None) or size.height or size.shortest_edge
        self._resolutions = [list(found) for found in self.processor.image_grid_pinpoints or ()]
        if not self._resolutions:
            raise UnsupportedModelError(
                "this model takes no images: its image processor has no `image_grid_pinpoints`"
            )
        tower = TowerRows(setup)
        self._patches = self._tile // tower.patch
        self._base = tower.rows(self._tile, self._tile)
        bounds = [self._bound(*resolution) for resolution in self._resolutions]
        smallest = min(map(math.prod, self._resolutions))
        # An image no larger than a tile gets one of the smallest resolutions.
        least = max(
            bound
            for bound, found in zip(bounds, self._resolutions, strict=True)
            if math.prod(found) == smallest
        )
        self._cap = max(setup.max_rows, least)
        own = max(bounds)
        self.set_limit(min(own, self._cap), own)

    def largest_image(self) -> tuple[int, int]:
        """A resolution of the list: without padding, it takes the most rows."""
        counts = {tuple(found): self.count(*found) for found in self._resolutions}
        fitting = [found for found, rows in counts.items() if rows <= self.max_rows]
        height, width = max(fitting or counts, key=counts.__getitem__)
        return width, height

    def count(self, height: int, width: int) -> int:
        """Rows of an image of this size in pixels."""
        from transformers.image_processing_utils import select_best_resolution

        best = select_best_resolution((height, width), self._resolutions)
        if best is None:
            raise ValueError("no resolution fits the image")
        rows, columns = (side // self._tile * self._patches for side in best)
        # The image is scaled to one side; the other is padded at both ends.
        if width / height > columns / rows:
            shown = int(round(height * (columns / width), 7))
            rows -= (rows - shown) // 2 * 2
        else:
            shown = int(round(width * (rows / height), 7))
            columns -= (columns - shown) // 2 * 2
        return self._with_lines(rows, columns)

    def _with_lines(self, rows: int, columns: int) -> int:
        """Rows of the whole image, of the patches of its tiles, and of their lines."""
        ratio = math.sqrt(rows * columns / (self._most_tiles * self._patches**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return rows * columns + rows + self._base

    def _bound(self, height: int, width: int) -> int:
        """The most rows that tiles of this resolution take, however much of them is padding.

        Padding is as wide at one end as at the other, so the rest has the same parity.
        """
        rows, columns = (side // self._tile * self._patches for side in (height, width))
        wide = (self._with_lines(shown, columns) for shown in range(rows, 0, -2))
        high = (self._with_lines(rows, shown) for shown in range(columns, 0, -2))
        return max(max(wide), max(high))

    def fitted(self, image: Image.Image) -> Image.Image:
        """The image, shrunk until it takes no more rows than the limit."""
        width, height = image.size
        scale = 1.0
        while self.count(height, width) > self._cap and max(width, height) > self._tile:
            scale *= 0.9
            width, height = (max(1, round(side * scale)) for side in image.size)
        return scaled(image, scale)

    def prepare(self, image: Image.Image, options: ImageOptions) -> Prepared:
        """See :meth:`Preprocessor.prepare`."""
        image = self.fitted(image)
        width, height = image.size
        outputs = self.outputs(image)
        pixels = np.asarray(outputs["pixel_values"])
        return self._prepared(pixels, (height, width), self.count(height, width))

    def _prepared(
        self, pixels: np.ndarray, size: tuple[int, int], rows: int, **others: Any
    ) -> Prepared:
        tensors = {
            "pixel_values": self.values(pixels),
            "image_sizes": np.array([size], np.int64),
            **others,
        }
        return Prepared(tensors, (self.rows(rows),))


class LlavaOnevisionPreprocessor(LlavaNextPreprocessor):
    """LLaVA-OneVision: the same, but with a limit on the patches of tiles.

    Each of several images of a request is one tile, padded to a square.
    """

    def __init__(self, setup: Setup) -> None:
        ratio = str(setup.config.get("vision_aspect_ratio", "anyres_max_9"))
        most = ratio.removeprefix("anyres_max_")
        if not most.isdecimal() or int(most) < 1:
            raise UnsupportedModelError(
                f"this model takes no images: `vision_aspect_ratio` {ratio[:40]} is not supported"
            )
        self._most_tiles = int(most)
        super().__init__(setup)

    def variant(self, options: ImageOptions) -> tuple[Any, ...]:
        """The mode, too."""
        return (options.low_detail, options.several)

    def prepare(self, image: Image.Image, options: ImageOptions) -> Prepared:
        """See :meth:`Preprocessor.prepare`."""
        if options.several:
            return self._prepare_square(image)
        prepared = super().prepare(image, options)
        tensors = {**prepared.tensors, "batch_num_images": np.array([1], np.int64)}
        return Prepared(tensors, prepared.pieces)

    def _prepare_square(self, image: Image.Image) -> Prepared:
        image = shrunk(image, _LONGEST_SQUARE)
        width, height = image.size
        processor = self.processor
        pixels = np.moveaxis(np.asarray(image), -1, 0)
        background = tuple(int(value * 255) for value in processor.image_mean)
        pixels = processor.pad_to_square(pixels, background)
        if processor.do_resize:
            pixels = processor.resize(pixels, processor.size, resample=processor.resample)
        if processor.do_center_crop:
            pixels = processor.center_crop(pixels, processor.crop_size)
        # 2 stands for several: the encoder then expects one tile of each image.
        number = np.array([2], np.int64)
        return self._prepared(
            pixels[None, None], (height, width), self._base + 1, batch_num_images=number
        )
