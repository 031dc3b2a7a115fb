"""What the preprocessing of an image takes and returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from PIL import Image

LOW_DETAIL_SIDE = 512
"""Longest side of an image with ``detail: low``, in pixels."""


class ImageError(ValueError):
    """An image, or a prompt with images, that the model cannot take.

    The message is for clients: it is fixed, except for numbers.
    """


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """A part of the text that stands for an image.

    Attributes:
        text: The text; for a run of rows, that of one placeholder token.
        rows: How often that token is repeated, once for each row; 0 for plain text.
    """

    text: str
    rows: int = 0


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """How one image of a request is processed.

    Attributes:
        low_detail: Shrink it until its longer side has at most ``LOW_DETAIL_SIDE`` pixels.
        several: The request has other images. LLaVA-OneVision processes these differently.
    """

    low_detail: bool = False
    several: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedImage:
    """An image, ready for the model's encoder.

    Attributes:
        digest: 32 bytes that differ where the image or its processing does.
        tensors: The arguments of transformers' ``get_image_features``, for this image alone.
            ``pixel_values`` are float32, float16, or bfloat16 as uint16.
        replacement: What stands for it in the prompt.
        grid: Height and width in rows, where rotary positions depend on them.
        bidirectional: Its rows attend to each other.
    """

    digest: bytes
    tensors: Mapping[str, Any]
    replacement: tuple[PromptPiece, ...]
    grid: tuple[int, int] | None = None
    bidirectional: bool = False

    @property
    def num_rows(self) -> int:
        """Number of rows that the encoder returns."""
        return sum(piece.rows for piece in self.replacement)


class ImageProcessor(Protocol):
    """Preprocesses the images of one model."""

    @property
    def max_rows(self) -> int:
        """The most rows that an image takes."""
        ...

    @property
    def note(self) -> str:
        """Log message on limits that shrink images; empty if none do."""
        ...

    def largest_image(self) -> tuple[int, int]:
        """Width and height of an image that takes ``max_rows``."""
        ...

    def digest(self, data: bytes, options: ImageOptions) -> bytes:
        """The key of an encoded image (a file's bytes) under these options: 32 bytes."""
        ...

    def process(self, image: Image.Image, options: ImageOptions, digest: bytes) -> ProcessedImage:
        """Preprocess a decoded RGB image.

        Raises:
            ImageError: The model cannot take an image of this shape.
        """
        ...
