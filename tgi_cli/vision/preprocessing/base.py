"""What the preprocessing of all families has in common."""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tgi_cli.vision.image_format import ImageFormat
from tgi_cli.vision.images import (
    LOW_DETAIL_SIDE,
    ImageError,
    ImageOptions,
    ProcessedImage,
    PromptPiece,
)
from tgi_cli.vision.preprocessing.values import normalized, value_table

if TYPE_CHECKING:
    from PIL import Image

_REFUSALS = (ValueError, ZeroDivisionError, OverflowError)
"""What image processors raise for images of impossible shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What preprocessing is made from.

    Attributes:
        processor: transformers' image processor.
        config: The checkpoint's config.json.
        max_rows: Images are shrunk to this many rows where the processor's settings allow it.
        dtype: Dtype of ``pixel_values``: one of :data:`.values.DTYPES`.
    """

    processor: Any
    image_format: ImageFormat
    config: Mapping[str, Any]
    max_rows: int
    dtype: str

    @property
    def vision(self) -> Mapping[str, Any]:
        """The configuration of the image encoder."""
        found = self.config.get("vision_config")
        return found if isinstance(found, dict) else {}

    @property
    def text(self) -> Mapping[str, Any]:
        """The configuration of the decoder."""
        found = self.config.get("text_config")
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A preprocessed image; attributes as those of ``ProcessedImage``."""

    tensors: Mapping[str, np.ndarray]
    pieces: tuple[PromptPiece, ...]
    grid: tuple[int, int] | None = None


class Preprocessor(ABC):
    """Preprocesses the images of one model; an ``ImageProcessor``.

    Attributes:
        max_rows: The most rows that an image takes.
        note: Log message on limits that shrink images; empty if none do.
        bidirectional: The rows of an image attend to each other.
        low_side: Longest side of an image with little detail, in pixels; None for families that
            scale all images to sizes of their own.
    """

    max_rows: int
    note: str = ""
    bidirectional: bool = False
    low_side: int | None = LOW_DETAIL_SIDE

    def __init__(self, setup: Setup) -> None:
        self.processor = setup.processor
        self.format = setup.image_format
        self._table = value_table(setup.processor, setup.dtype)
        self._settings = json.dumps(
            [setup.image_format.family, setup.max_rows, setup.processor.to_dict()],
            sort_keys=True,
            default=str,
        ).encode()

    @abstractmethod
    def prepare(self, image: Image.Image, options: ImageOptions) -> Prepared:
        """Preprocess an RGB image. Raises ValueError if its shape is impossible."""

    @abstractmethod
    def largest_image(self) -> tuple[int, int]:
        """Width and height of an image that takes ``max_rows``, or nearly."""

    def variant(self, options: ImageOptions) -> tuple[Any, ...]:
        """The options that change the result."""
        return (options.low_detail,)

    def digest(self, data: bytes, options: ImageOptions) -> bytes:
        """The key of an encoded image (a file's bytes) under these options: 32 bytes.

        The file's bytes, not its pixels: two shapes may have the same pixels in the same order.
        """
        key = hashlib.blake2b(digest_size=32, person=b"tgi image")
        for part in (self._settings, repr(self.variant(options)).encode()):
            key.update(len(part).to_bytes(8, "little") + part)
        key.update(data)
        return key.digest()

    def process(self, image: Image.Image, options: ImageOptions, digest: bytes) -> ProcessedImage:
        """Preprocess a decoded RGB image.

        Raises:
            ImageError: The model cannot take an image of this shape.
        """
        width, height = image.size
        try:
            if options.low_detail and self.low_side:
                image = shrunk(image, self.low_side)
            prepared = self.prepare(image, options)
        except _REFUSALS as error:
            raise ImageError(
                f"the model cannot take an image of {width} x {height} pixels"
            ) from error
        processed = ProcessedImage(
            digest=digest,
            tensors=prepared.tensors,
            replacement=prepared.pieces,
            grid=prepared.grid,
            bidirectional=self.bidirectional,
        )
        if processed.num_rows > self.max_rows:
            raise ImageError(
                f"an image of {width} x {height} pixels takes {processed.num_rows} tokens, "
                f"more than the limit of {self.max_rows}"
            )
        return processed

    def outputs(self, image: Image.Image, **settings: Any) -> Mapping[str, Any]:
        """The image processor's outputs as arrays, with 8-bit pixels."""
        outputs: Mapping[str, Any] = self.processor.preprocess(
            image,
            return_tensors="np",
            do_convert_rgb=False,
            do_rescale=False,
            do_normalize=False,
            **settings,
        )
        return outputs

    def values(self, pixels: np.ndarray, axis: int = -3) -> np.ndarray:
        """The values of 8-bit pixels; ``axis`` is that of the channels."""
        return normalized(pixels, self._table, axis)

    def rows(self, count: int) -> PromptPiece:
        """A run of rows."""
        return PromptPiece(self.format.row_token, count)

    def set_limit(self, rows: int, own: int) -> None:
        """Set ``max_rows``, and ``note`` if that is less than the model's own limit."""
        self.max_rows = rows
        if rows < own:
            self.note = f"images are shrunk to at most {rows} tokens; the model allows {own}"


def shrunk(image: Image.Image, side: int) -> Image.Image:
    """The image, its longer side no longer than ``side`` pixels."""
    return scaled(image, side / max(image.size))


def scaled(image: Image.Image, scale: float) -> Image.Image:
    """The image, smaller by a factor; unchanged if that is 1 or more."""
    if scale >= 1:
        return image
    width, height = (max(1, round(side * scale)) for side in image.size)
    return image.resize((width, height), _bicubic())


def _bicubic() -> Image.Resampling:
    from PIL import Image  # the module is imported where there is no Pillow, too

    return Image.Resampling.BICUBIC


def largest_rectangle(area: int, side: int | None = None) -> tuple[int, int]:
    """Height and width, whole numbers, of the largest rectangle of at most this area.

    It is at most four times as wide as it is high, and at most ``side`` wide.
    """
    for whole in range(area, 0, -1):
        root = math.isqrt(whole)
        for height in range(root, max(0, root // 2 - 1), -1):
            width, rest = divmod(whole, height)
            if not rest and (side is None or width <= side):
                return height, width
    return 1, 1


def integer(value: Any, default: int) -> int:
    """A positive integer of a configuration, or the default of transformers' class."""
    return value if isinstance(value, int) and value > 0 else default
