"""From the images of a request to what the model's encoder takes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.process.installation import install_command
from tgi_cli.process.worker_pool import (
    LimitError,
    Limits,
    WorkerError,
    WorkerPool,
    WorkersBusy,
)
from tgi_cli.text.images import ImagePart
from tgi_cli.vision.errors import MediaError, unreadable
from tgi_cli.vision.fetch import MediaFetcher
from tgi_cli.vision.image_format import ImageFormat
from tgi_cli.vision.images import ProcessedImage
from tgi_cli.vision.limits import ImageLimits
from tgi_cli.vision.packing import encode_job, unpack

logger = logging.getLogger(__name__)

MODULE = "tgi_cli.vision.image_process"
_SECONDS, _SECONDS_PER_MEGAPIXEL = 10.0, 0.5
"""Time for one image on slow and busy machines; 20 megapixels take a second otherwise."""
_MEGABYTES, _BYTES_PER_PIXEL = 256, 32
"""Memory for one image besides its file: it is decoded, turned, put on white, and resized."""
_WAIT_SECONDS = 60.0
_WAITING_BYTES = 512 << 20
"""Files of images that wait to be processed, of all requests."""
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",  # that there is no torch, on purpose
}


def worker_limits(limits: ImageLimits) -> Limits:
    """The limits of the processes, in proportion to the largest image that they may get."""
    megapixels = limits.max_image_pixels / 1e6
    files = 3 * (limits.max_image_fetch_size >> 20)
    return Limits(
        processes=limits.image_workers,
        seconds=_SECONDS + _SECONDS_PER_MEGAPIXEL * megapixels,
        megabytes=_MEGABYTES + files + int(_BYTES_PER_PIXEL * megapixels),
        wait_seconds=_WAIT_SECONDS,
        reserved=0,
    )


class ImageService:
    """Fetches, decodes and preprocesses the images of requests to one model.

    Creating it starts a process and takes seconds.

    Attributes:
        max_rows: The most rows that an image takes.
        largest_image: Width and height of an image that takes them.
        note: Log message on limits that shrink images; empty if none do.
        pool: The processes.

    Args:
        folder: Folder of the model.
        image_format: How the model's prompts write images.
        max_rows: Shrink images that take more rows. Default: the processor's own limits.
        dtype: Dtype of ``pixel_values``; see :func:`tgi_cli.vision.processing.image_processor`.
        fetcher: Gets the files of images.
        processes: Limits of the processes. Default: in proportion to the largest image.
        module: Main module of the processes.

    Raises:
        UnsupportedModelError: The model's images cannot be processed, or Pillow is missing.
        WorkerError: No process can be started.
    """

    def __init__(
        self,
        folder: Path,
        image_format: ImageFormat,
        limits: ImageLimits,
        *,
        max_rows: int | None = None,
        dtype: str = "float32",
        fetcher: MediaFetcher | None = None,
        processes: Limits | None = None,
        module: str = MODULE,
    ) -> None:
        if find_spec("PIL") is None:
            raise UnsupportedModelError(
                "this model takes no images: Pillow is not installed",
                install_command("vision"),
            )
        self._limits = limits
        self._fetcher = MediaFetcher(limits) if fetcher is None else fetcher
        self._bytes = 0
        """Bytes of the images in the processes and waiting for them."""
        setup = {
            "folder": str(folder),
            "format": asdict(image_format),
            "max_rows": max_rows,
            "dtype": dtype,
            "max_pixels": limits.max_image_pixels,
        }
        self.pool = WorkerPool(
            module,
            setup,
            processes or worker_limits(limits),
            what="image",
            remedy="see its traceback above",
            environment=_ENVIRONMENT,
        )
        try:
            found = self.pool.run(encode_job(job="describe"))
        except LimitError as error:
            self.pool.close()
            raise UnsupportedModelError(
                f"this model takes no images: its image processor takes {error} to start"
            ) from error
        except BaseException:
            self.pool.close()
            raise
        if "max_rows" not in found:
            self.pool.close()
            cause = found.get("unsupported") or found["error"]
            raise UnsupportedModelError(cause, found.get("remedy", ""))
        self.max_rows: int = found["max_rows"]
        self.note: str = found["note"]
        width, height = found["largest_image"]
        self.largest_image: tuple[int, int] = (width, height)

    async def process(self, images: Sequence[ImagePart]) -> list[ProcessedImage]:
        """What the model's encoder takes, for each image of a prompt.

        If one cannot be processed, the others are given up.

        Raises:
            ImageError: There are too many, or one cannot be fetched, decoded or processed.
        """
        most = self._limits.max_images
        if len(images) > most:
            raise MediaError(
                f"At most {most} image(s) may be provided in one prompt.", "invalid_value"
            )
        several = len(images) > 1
        slots = asyncio.Semaphore(self._limits.image_workers)  # bounds the bytes of one request
        tasks = [asyncio.ensure_future(self._process(image, several, slots)) for image in images]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        """End the processes; images in progress fail."""
        self.pool.close()

    async def _process(
        self, image: ImagePart, several: bool, slots: asyncio.Semaphore
    ) -> ProcessedImage:
        async with slots:
            return await self._fetch_and_process(image, several)

    async def _fetch_and_process(self, image: ImagePart, several: bool) -> ProcessedImage:
        data = await self._fetcher.fetch(image.source)
        if self._bytes and self._bytes + len(data) > _WAITING_BYTES:
            raise _busy()
        self._bytes += len(data)
        try:
            return await self._in_child(data, image.detail == "low", several)
        finally:
            self._bytes -= len(data)

    async def _in_child(self, data: bytes, low_detail: bool, several: bool) -> ProcessedImage:
        head = encode_job(job="process", low_detail=low_detail, several=several)
        try:
            found = await self.pool.run_async([head, data])
        except LimitError as error:
            raise unreadable(f"it takes {error} to process") from None
        except WorkersBusy:
            raise _busy() from None
        except WorkerError as error:
            logger.error("%s; %s", error.cause, error.remedy)
            raise _failed() from None
        if "refused" in found:
            raise MediaError(found["refused"], found["code"])
        if "failed" in found:
            width, height = found["size"]
            logger.error("the image processor failed on %dx%d: %s", width, height, found["failed"])
            raise unreadable(f"the model cannot take one of {width} x {height} pixels")
        if "digest" not in found:  # a defect, which is in the log
            raise _failed()
        return unpack(found, found.get("data", b""))


def _busy() -> MediaError:
    return MediaError("too many images are being processed", "server_error", unavailable=True)


def _failed() -> MediaError:
    return MediaError("the server failed to process an image", "server_error", unavailable=True)
