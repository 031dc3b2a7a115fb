"""Images of prompts: random, distinct, and as cheap to make as the load generator needs them."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from tgi_cli.bench.events import BenchRequest
from tgi_cli.errors import ConfigError

_FORM = re.compile(r"(\d+)(?:x(\d+)x(\d+))?(?::([0-9.]+))?")
_MOST_IMAGES = 1024
_MOST_PIXELS = 16384
"""Limit of the pixels of a side."""
_BLOCK = 8
"""Pixels of a block's side. A photo of 1920 x 1080 pixels is then some 170 kB."""
_POOL = 32
"""Images that may be repeated."""


class ImageWorkload(msgspec.Struct, frozen=True):
    """Images of each prompt; of a conversation, those of its first turn.

    Attributes:
        count: Images of a prompt.
        width, height: In pixels.
        repeated: Share of the images that an earlier request of the step had.
    """

    count: int
    width: int = 512
    height: int = 512
    repeated: float = 0.0

    @classmethod
    def parse(cls, text: str) -> ImageWorkload:
        """Parse ``1``, ``1x1920x1080`` or ``2x1920x1080:0.5``. Raises ConfigError."""
        match = _FORM.fullmatch(text.strip())
        try:
            if match is None:
                raise ValueError
            count, width, height, share = match.groups()
            sides = (int(width), int(height)) if width else (512, 512)
            images = cls(int(count), *sides, float(share or 0.0))
            most = max(images.width, images.height)
            least = min(images.count, images.width, images.height)
            if least < 1 or images.count > _MOST_IMAGES or most > _MOST_PIXELS:
                raise ValueError
            if images.repeated > 1:
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"--images: {text!r} is not N, NxWIDTHxHEIGHT or NxWIDTHxHEIGHT:SHARE",
                "for example 1x1920x1080:0.5",
            ) from None
        return images

    def __str__(self) -> str:
        text = f"{self.count}x{self.width}x{self.height}"
        return f"{text}:{self.repeated:g}" if self.repeated else text


def with_images(
    requests: Iterable[BenchRequest], images: ImageWorkload, seed: int
) -> Iterator[BenchRequest]:
    """Yield the requests with images, as ``data:`` URLs."""
    rng = np.random.default_rng(seed)
    pool: deque[str] = deque(maxlen=_POOL)
    begun: set[int] = set()

    def image() -> str:
        if pool and rng.random() < images.repeated:
            return pool[int(rng.integers(len(pool)))]
        data = random_png(rng, images.width, images.height)
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        if images.repeated:
            pool.append(url)
        return url

    for request in requests:
        if request.conversation is not None:
            if request.conversation in begun:
                yield request
                continue
            begun.add(request.conversation)
        urls = [image() for _ in range(images.count)]
        yield msgspec.structs.replace(request, images=urls)


def random_png(rng: np.random.Generator, width: int, height: int) -> bytes:
    """A PNG of blocks of random colors (PNG specification, https://www.w3.org/TR/png-3/).

    Rows that equal the one above are zeros under the filter ``Up``, which takes nearly no time and
    space to compress.
    """
    blocks = rng.integers(0, 256, (-(-height // _BLOCK), -(-width // _BLOCK), 3), np.uint8)
    rows = np.zeros((height, 1 + 3 * width), np.uint8)
    rows[:, 0] = 2  # the filter Up
    rows[::_BLOCK, 0] = 0
    rows[::_BLOCK, 1:] = blocks.repeat(_BLOCK, axis=1)[:, :width].reshape(len(blocks), -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits of red, green, blue
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(kind, data)
        for kind, data in (
            (b"IHDR", header),
            (b"IDAT", zlib.compress(rows.tobytes(), 1)),
            (b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
