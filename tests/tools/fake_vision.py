"""Images for tests without Pillow and without a vision-language model.

The file of an image is a text: ``image 6`` is one of six rows, ``image 6 2x3`` also has a grid. It
stands for ``<image>`` in a prompt, and is replaced by its rows between ``[`` and ``]``.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken

from tests.unit.text import tiny
from tgi_cli.text.bundle import TextBundle
from tgi_cli.text.images import ImagePart
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.vision.errors import unreadable
from tgi_cli.vision.fetch import MediaFetcher
from tgi_cli.vision.image_format import ImageFormat
from tgi_cli.vision.images import ProcessedImage, PromptPiece
from tgi_cli.vision.limits import ImageLimits
from tgi_cli.vision.load import Vision
from tgi_cli.vision.prompts import ImageReader

IMAGE = "<image>"
MAX_IMAGES = 4

PARTS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that writes the placeholder for a part of the type ``image``."""

_FILE = re.compile(rb"image (\d+)(?: (\d+)x(\d+))?")


def file_of(rows: int, grid: str = "") -> bytes:
    """The file of an image."""
    return f"image {rows} {grid}".strip().encode()


def data_url(rows: int, grid: str = "") -> str:
    """The same as a ``data:`` URL."""
    return "data:image/png;base64," + base64.b64encode(file_of(rows, grid)).decode()


class FakeImages:
    """Stands in for :class:`tgi_cli.vision.service.ImageService`.

    Attributes:
        seen: The images that it was asked for.
        closed: Whether it was closed.
    """

    def __init__(self, limits: ImageLimits | None = None) -> None:
        self.seen: list[ImagePart] = []
        self.closed = False
        self._fetcher = MediaFetcher(limits or ImageLimits())

    async def process(self, images: Sequence[ImagePart]) -> list[ProcessedImage]:
        self.seen += images
        return [processed(await self._fetcher.fetch(each.source), each.detail) for each in images]

    def close(self) -> None:
        self.closed = True


def processed(file: bytes, detail: str | None = None) -> ProcessedImage:
    """What becomes of a file; ``detail: low`` halves its rows. Raises MediaError."""
    found = _FILE.fullmatch(file)
    if found is None:
        raise unreadable("it has no known format")
    rows = int(found[1]) // (2 if detail == "low" else 1)
    grid = (int(found[2]), int(found[3])) if found[2] else None
    return ProcessedImage(
        digest=hashlib.blake2b(b"%b %d" % (file, rows), digest_size=32).digest(),
        tensors={
            "pixel_values": np.arange(rows * 4, dtype=np.float32).reshape(rows, 4),
            "image_sizes": np.array([rows, 1]),
        },
        replacement=(PromptPiece("["), PromptPiece(IMAGE, rows), PromptPiece("]")),
        grid=grid,
    )


def bundle(folder: Path, chat_template: str | None = PARTS_TEMPLATE) -> TextBundle:
    """The text side of a vision-language model."""
    tiny.write_model(folder, chat_template)
    backend = tiny.byte_level()
    backend.add_special_tokens([AddedToken(IMAGE, special=True, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    return TextBundle.load(folder)


def image_format(tokenizer: Tokenizer, special_tokens: bool = True) -> ImageFormat:
    """How its prompts write images."""
    index = tokenizer.backend.token_to_id(IMAGE)
    assert index is not None
    return ImageFormat(
        family="fake",
        placeholder=IMAGE,
        text=IMAGE,
        row_token=IMAGE,
        placeholder_id=index,
        special_tokens=special_tokens,
    )


def vision(text: TextBundle, images: FakeImages) -> Vision:
    """The images of such a model."""
    return Vision(ImageReader(image_format(text.tokenizer), images, MAX_IMAGES))
