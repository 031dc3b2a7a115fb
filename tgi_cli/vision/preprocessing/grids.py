"""Families that take as many patches as an image has: Qwen's, GLM's and PaddleOCR-VL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.vision.images import ImageOptions
from tgi_cli.vision.preprocessing.base import Prepared, Preprocessor, Setup, largest_rectangle
from tgi_cli.vision.preprocessing.values import CHANNELS

if TYPE_CHECKING:
    from PIL import Image


class GridPreprocessor(Preprocessor):
    """The image is scaled to whole blocks of patches; the encoder returns a row for each block."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        processor = self.processor
        size = processor.size
        if not (size.shortest_edge and size.longest_edge and hasattr(processor, "merge_size")):
            raise UnsupportedModelError(
                "this model takes no images: its image processor's `size` has no `shortest_edge` "
                "and `longest_edge`"
            )
        self._patch: int = processor.patch_size
        self._merge: int = processor.merge_size
        self._frames: int = processor.temporal_patch_size
        self._block = self._patch * self._merge
        self._resizing: dict[str, Any] = {"factor": self._block}
        pixels = self._block**2
        if setup.image_format.family == "glm4v":
            # Its limits count an image as a video of as many frames as a patch has.
            pixels *= self._frames
            self._resizing["temporal_factor"] = self._frames
        # Edges are numbers of pixels here.
        longest = min(size.longest_edge, setup.max_rows * pixels)
        shortest = min(size.shortest_edge, longest)
        self._size = type(size)(shortest_edge=shortest, longest_edge=longest)
        self.set_limit(longest // pixels, size.longest_edge // pixels)

    def largest_image(self) -> tuple[int, int]:
        """Whole blocks, so that it is not scaled."""
        height, width = largest_rectangle(self.max_rows)
        return width * self._block, height * self._block

    def prepare(self, image: Image.Image, options: ImageOptions) -> Prepared:
        """See :meth:`Preprocessor.prepare`."""
        processor = self.processor
        pixels = np.moveaxis(np.asarray(image), -1, 0)
        if processor.do_resize:
            pixels = processor.resize(
                pixels, size=self._size, resample=processor.resample, **self._resizing
            )
        height, width = (side // self._block for side in pixels.shape[-2:])
        grid = [[1, height * self._merge, width * self._merge]]
        tensors = {
            "pixel_values": self._patches(pixels, height, width),
            "image_grid_thw": np.array(grid, np.int64),
        }
        return Prepared(tensors, (self.rows(height * width),), (height, width))

    def _patches(self, pixels: np.ndarray, height: int, width: int) -> np.ndarray:
        """The patches of ``height`` x ``width`` blocks, block by block: [patches, values].

        As `patchify` of the processor, but of one byte a pixel and one frame.
        """
        patches = (
            pixels.reshape(
                CHANNELS, height, self._merge, self._patch, width, self._merge, self._patch
            )
            .transpose(1, 4, 2, 5, 0, 3, 6)
            .reshape(-1, CHANNELS, 1, self._patch**2)
        )
        frames = np.repeat(self.values(patches), self._frames, axis=2)
        return frames.reshape(len(frames), -1)


class PaddleOcrPreprocessor(GridPreprocessor):
    """Patches are in rows, as images themselves; the projector finds their blocks."""

    def _patches(self, pixels: np.ndarray, height: int, width: int) -> np.ndarray:
        """[patches, channels, side, side]."""
        patches = (
            pixels.reshape(
                CHANNELS, height * self._merge, self._patch, width * self._merge, self._patch
            )
            .transpose(1, 3, 0, 2, 4)
            .reshape(-1, CHANNELS, self._patch, self._patch)
        )
        return self.values(patches)
