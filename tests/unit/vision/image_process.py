"""The process of images for tests: as the real one, with a processor that needs no model.

What else it does is told by the width of an image.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy
from PIL import Image

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.process.pool_worker import Work, serve
from tgi_cli.vision.decode import load_decoders
from tgi_cli.vision.image_process import Images, unsupported
from tgi_cli.vision.images import ImageError, ImageOptions, ProcessedImage, PromptPiece


def _raise(error: Exception) -> None:
    raise error


def _take_memory() -> None:
    kept = []
    while True:
        kept.append(bytes(1 << 20))


ACTIONS: dict[int, Callable[[], object]] = {
    101: lambda: _raise(ImageError("the sides of an image differ too much")),
    102: lambda: _raise(ZeroDivisionError("at 0x7f0123456789")),
    103: _take_memory,
    104: lambda: time.sleep(60),
    105: lambda: os.kill(os.getpid(), signal.SIGKILL),
    106: lambda: os.kill(os.getpid(), signal.SIGSEGV),
    107: lambda: _raise(SystemExit("defect")),
    108: lambda: time.sleep(0.2),
}


class Pixels:
    """The pixels of an image as its tensors, and a row for each of its columns up to 50."""

    max_rows = 50
    note = "large images are shrunk"

    def __init__(self, row_token: str) -> None:
        self._row_token = row_token

    def largest_image(self) -> tuple[int, int]:
        return 50, 10

    def digest(self, data: bytes, options: ImageOptions) -> bytes:
        own = bytes((options.low_detail, options.several))
        return hashlib.blake2b(data, digest_size=32, person=own).digest()

    def process(self, image: Image.Image, options: ImageOptions, digest: bytes) -> ProcessedImage:
        ACTIONS.get(image.width, lambda: None)()
        pixels = numpy.asarray(image)
        return ProcessedImage(
            digest=digest,
            tensors={
                "pixel_values": pixels.astype(numpy.float32)[None],
                "halves": pixels[:, :, 0].astype(numpy.uint16).T,
                "image_grid_thw": numpy.array([[1, image.height, image.width]]),
                "process": numpy.array(os.getpid()),
                "empty": numpy.zeros((0, 3), numpy.float32),
            },
            replacement=(
                PromptPiece("["),
                PromptPiece(self._row_token, min(image.width, self.max_rows)),
                PromptPiece("]\udcff" if image.width == 30 else "]"),
            ),
            grid=(image.height, image.width) if options.several else None,
            bidirectional=options.low_detail,
        )


def _begin(setup: Any) -> Work:
    if setup["folder"].endswith("unsupported"):
        error = UnsupportedModelError("it has no processor", "take another model")
        return unsupported(error.cause, error.remedy)
    load_decoders()
    return Images(Pixels(setup["format"]["row_token"]), setup["max_pixels"])


if __name__ == "__main__":
    serve(_begin)
