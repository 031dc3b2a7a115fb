"""Images of prompts and conversations of the Python API."""

from __future__ import annotations

import asyncio
import io
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tgi_cli.engine.messages import EngineInfo
from tgi_cli.files import read_bytes
from tgi_cli.text.bundle import TextBundle
from tgi_cli.text.images import ImageMarks, ImagePart
from tgi_cli.vision.image_format import renders_images
from tgi_cli.vision.images import ImageError, ProcessedImage
from tgi_cli.vision.limits import ImageLimits
from tgi_cli.vision.load import Vision, load_vision
from tgi_cli.vision.prompts import (
    MOST_TOKENS,
    ImagePrompt,
    ImageReader,
    PromptTooLongError,
    bounded_tokenize,
    encode_prompt,
)

if TYPE_CHECKING:
    from PIL.Image import Image

    ImageSource = Image | bytes | str | PathLike[str]
else:
    ImageSource = Any

_MOST_IMAGES = 1024
"""Images of one prompt."""
_AT_ONCE = 4
"""Prompts whose images are read at once."""
_URL = re.compile(r"(data|https?):", re.ASCII | re.IGNORECASE)
_PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")


class ModelImages:
    """Reads images for one model; its processes start with the first image. Thread-safe.

    Args:
        folder: Folder of the model.
        text: Its tokenizer and chat template.
        info: Facts of its engine.
    """

    def __init__(self, folder: Path, text: TextBundle, info: EngineInfo) -> None:
        self._folder = folder
        self._text = text
        self._info = info
        self._lock = threading.Lock()
        self._vision: Vision | None = None
        self._in_parts = False

    @property
    def reader(self) -> ImageReader:
        """Raises ValueError if the model takes no images."""
        with self._lock:
            if self._vision is None:
                limits = ImageLimits(max_images=_MOST_IMAGES)
                self._vision = load_vision(self._folder, self._text.tokenizer, limits, self._info)
                reader, template = self._vision.reader, self._text.chat_template
                if reader is not None and template is not None:
                    self._in_parts = renders_images(template, reader.image_format)
        if self._vision.reader is None:
            reason = self._vision.reason or "it takes text only"
            raise ValueError(f"{self._info.model_id} takes no images: {reason}")
        return self._vision.reader

    @property
    def in_parts(self) -> bool:
        """Whether the chat template takes images as parts. Raises ValueError as :attr:`reader`."""
        return self.reader is not None and self._in_parts

    def encode(
        self, prompts: Sequence[tuple[str, Sequence[ImagePart]]], add_special_tokens: bool
    ) -> list[ImagePrompt]:
        """Tokenize prompts with images.

        A text has the model's placeholder for each image, or none: then they are put in front.

        Raises:
            ValueError: The model takes no images, or one cannot be read or placed.
        """
        tokenizer = self._text.tokenizer
        if not any(parts for _, parts in prompts):
            return [
                ImagePrompt(tokenizer.encode(text, add_special_tokens), ()) for text, _ in prompts
            ]
        reader = self.reader
        with ThreadPoolExecutor(1, thread_name_prefix="images") as thread:
            # In a thread of its own: the caller's may run an event loop (Jupyter's does).
            parts = [parts for _, parts in prompts]
            processed = thread.submit(asyncio.run, _read_all(reader, parts)).result()
        written = reader.image_format
        special = add_special_tokens and written.special_tokens
        tokenize = bounded_tokenize(tokenizer, special, MOST_TOKENS)
        found = []
        for (text, _), images in zip(prompts, processed, strict=True):
            if not images:
                found.append(ImagePrompt(tokenizer.encode(text, add_special_tokens), ()))
                continue
            if written.placeholder not in text:
                text = written.text * len(images) + text
            try:
                found.append(encode_prompt(text, images, written, tokenize))
            except PromptTooLongError as error:
                raise ValueError(f"a prompt has {error}") from None
        return found

    def close(self) -> None:
        """End the processes. May be called twice."""
        if self._vision is not None and self._vision.reader is not None:
            self._vision.reader.close()


async def _read_all(
    reader: ImageReader, prompts: Sequence[Sequence[ImagePart]]
) -> list[list[ProcessedImage]]:
    slots = asyncio.Semaphore(_AT_ONCE)

    async def read(index: int, parts: Sequence[ImagePart]) -> list[ProcessedImage]:
        async with slots:
            try:
                return await reader.read(parts)
            except ImageError as error:
                raise ValueError(f"an image of prompt {index}: {error}") from None

    return await asyncio.gather(*(read(index, parts) for index, parts in enumerate(prompts)))


def image_part(image: ImageSource | ImagePart, detail: str | None = None) -> ImagePart:
    """An image as the engine's image reader takes it.

    Args:
        image: A PIL image, the bytes of a file, a path, or a ``data:`` URL.

    Raises:
        OSError: The file cannot be read.
        TypeError: It is none of these.
    """
    if isinstance(image, ImagePart):
        return image
    if isinstance(image, bytes | bytearray | memoryview):
        return ImagePart(bytes(image), detail)
    if isinstance(image, str) and _URL.match(image):
        return ImagePart(image, detail)
    if isinstance(image, str | PathLike):
        most = ImageLimits().max_image_fetch_size
        return ImagePart(read_bytes(Path(image).expanduser(), most), detail)
    if not hasattr(image, "getexif"):
        raise TypeError(f"an image must be a PIL image, bytes or a path, not {type(image)}")
    return ImagePart(_png(image), detail)


def _png(image: Image) -> bytes:
    """The file of a PIL image, turned upright, which the decoding process reads back losslessly."""
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)
    if upright.mode not in _PNG_MODES:
        upright = upright.convert("RGB")
    file = io.BytesIO()
    upright.save(file, "PNG", compress_level=1)
    return file.getvalue()


def marked_text(content: Any, marks: ImageMarks) -> str:
    """The text of a message's content, with a mark for each image, which is added to ``marks``.

    Images are parts ``{"type": "image", "image": IMAGE}``, or OpenAI's ``{"type": "image_url",
    "image_url": URL}`` with a string or ``{"url": URL}``.

    Raises:
        ValueError: It has anything but text and images.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise ValueError("the content of a message must be text, or a list of parts")
    return "".join([_part_text(part, marks) for part in content])


def _part_text(part: Any, marks: ImageMarks) -> str:
    if isinstance(part, Mapping):
        detail = part.get("detail")
        if isinstance(part.get("text"), str):
            return str(part["text"])
        if part.get("type") == "image" and part.get("image") is not None:
            return marks.add(image_part(part["image"], detail))
        if part.get("type") == "image_url":
            url = part.get("image_url")
            if isinstance(url, Mapping):
                detail = url.get("detail")
                url = url.get("url")
            if isinstance(url, str):
                return marks.add(ImagePart(url, detail))
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ValueError(f"the content of a message must be text and images, not {kind!r}")
