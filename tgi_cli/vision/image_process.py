"""The process that decodes and preprocesses images: ``python -m tgi_cli.vision.image_process``.

A file of a hundred bytes may claim to be an image of gigabytes, and decoders have had errors of
memory. :mod:`tgi_cli.process.pool_worker` limits the time and the memory of each image.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tgi_cli.errors import TgiError
from tgi_cli.process.pool_worker import Reply, Work, serve
from tgi_cli.vision.decode import decode, load_decoders
from tgi_cli.vision.errors import MediaError
from tgi_cli.vision.image_format import ImageFormat
from tgi_cli.vision.images import ImageError, ImageOptions, ImageProcessor
from tgi_cli.vision.packing import decode_job, pack
from tgi_cli.vision.processing import hide_torch, image_processor

_LONGEST_CAUSE = 300
_NICE = 5
"""Added to the niceness: a third of the time of a core that the engine wants, too."""


class Images:
    """Processes the images of one model.

    Args:
        processor: Processor of the model.
        max_pixels: Of an image as it comes.
    """

    def __init__(self, processor: ImageProcessor, max_pixels: int) -> None:
        self._processor = processor
        self._max_pixels = max_pixels

    def __call__(self, body: bytes) -> Reply:
        """Run a job.

        ``{"job": "describe"}`` returns ``max_rows``, ``note`` and ``largest_image``.
        ``{"job": "process", "low_detail", "several"}``, followed by a file, returns what
        :func:`tgi_cli.vision.packing.pack` does; or ``refused``, the text for the client, and
        ``code``; or ``failed``, the cause for the log, and ``size`` of the image.
        """
        job, data = decode_job(body)
        if job.pop("job") == "describe":
            own = self._processor
            return {
                "max_rows": own.max_rows,
                "note": own.note,
                "largest_image": own.largest_image(),
            }
        try:
            return self._process(data, ImageOptions(**job))
        except MediaError as error:
            return {"refused": str(error), "code": error.code}
        except ImageError as error:
            return {"refused": str(error), "code": "invalid_image"}

    def _process(self, data: bytes, options: ImageOptions) -> Reply:
        digest = self._processor.digest(data, options)
        image = decode(data, self._max_pixels)
        try:
            found = self._processor.process(image, options, digest)
        except (ImageError, MemoryError):
            raise
        except Exception as error:  # of transformers' code, on an image of an odd shape
            cause = f"{type(error).__name__}: {error}"[:_LONGEST_CAUSE]
            return {"failed": cause, "size": image.size}
        return pack(found)


def unsupported(cause: str, remedy: str) -> Work:
    """Answers every job with the reason why the model's images cannot be processed."""
    return lambda _: {"unsupported": cause, "remedy": remedy}


def _begin(setup: Mapping[str, Any]) -> Work:
    os.nice(_NICE)  # streams of other requests go on meanwhile
    try:
        load_decoders()
        hide_torch()
        processor = image_processor(
            Path(setup["folder"]),
            ImageFormat(**setup["format"]),
            setup["max_rows"],
            setup["dtype"],
        )
    except TgiError as error:
        return unsupported(error.cause, error.remedy)
    except ImportError as error:
        cause = f"this model takes no images: {error.name or 'a library'} cannot be imported"
        return unsupported(cause, "")
    return Images(processor, setup["max_pixels"])


if __name__ == "__main__":
    serve(_begin)
