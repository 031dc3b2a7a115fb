"""Images of requests, through the processes that decode and preprocess them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from tests.tools.event_loop_gap import loop_gap
from tests.unit.vision.hostile_files import FILES, MAX_PIXELS, Refused, written
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.process.installation import install_command
from tgi_cli.process.worker_pool import Limits
from tgi_cli.text.images import ImagePart
from tgi_cli.vision import service as module
from tgi_cli.vision.errors import MediaError
from tgi_cli.vision.image_format import ImageFormat
from tgi_cli.vision.images import ImageError, ProcessedImage
from tgi_cli.vision.limits import ImageLimits
from tgi_cli.vision.service import ImageService, worker_limits

MODULE = "tests.unit.vision.image_process"
LIMITS = Limits(processes=2, seconds=30, megabytes=256, wait_seconds=30, reserved=0)
FORMAT = ImageFormat(
    family="x", placeholder="<image>", text="<image>", row_token="<row>", placeholder_id=5
)
Make = Callable[..., ImageService]


@pytest.fixture
def make() -> Iterator[Make]:
    services: list[ImageService] = []

    def make(folder: str = "model", processes: Limits = LIMITS, **limits: Any) -> ImageService:
        limits = {"max_image_pixels": MAX_PIXELS, **limits}
        services.append(
            ImageService(
                Path(folder), FORMAT, ImageLimits(**limits), processes=processes, module=MODULE
            )
        )
        return services[-1]

    yield make
    for service in services:
        service.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[ImageService]:
    limits = ImageLimits(max_image_pixels=MAX_PIXELS)
    service = ImageService(Path("model"), FORMAT, limits, processes=LIMITS, module=MODULE)
    yield service
    service.close()


def png(width: int, height: int = 2, colour: tuple[int, int, int] = (1, 2, 3)) -> bytes:
    return written(Image.new("RGB", (width, height), colour), "PNG")


async def one(service: ImageService, data: bytes, detail: str | None = None) -> ProcessedImage:
    (found,) = await service.process([ImagePart(data, detail)])
    return found


async def refused(service: ImageService, *images: bytes) -> MediaError:
    with pytest.raises(MediaError) as caught:
        await service.process([ImagePart(image) for image in images])
    return caught.value


class TestDescription:
    def test_the_processor_is_described(self, shared: ImageService) -> None:
        assert shared.max_rows == 50
        assert shared.largest_image == (50, 10)
        assert shared.note == "large images are shrunk"

    def test_a_model_without_a_processor(self, make: Make) -> None:
        with pytest.raises(UnsupportedModelError, match=r"^it has no processor$") as caught:
            make("unsupported")
        assert caught.value.remedy == "take another model"

    def test_without_pillow(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        find = importlib.util.find_spec
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == "PIL" else find(name))
        with pytest.raises(
            UnsupportedModelError, match="takes no images: Pillow is not installed"
        ) as caught:
            make()
        assert caught.value.remedy == install_command("vision")

    def test_limits_follow_the_largest_image(self) -> None:
        small = worker_limits(ImageLimits(max_image_pixels=1_000_000, image_workers=3))
        large = worker_limits(ImageLimits(max_image_pixels=100_000_000))
        assert small.processes == 3
        assert large.megabytes - small.megabytes == 99 * 32
        assert large.seconds > small.seconds
        assert worker_limits(ImageLimits(max_image_fetch_size=1 << 30)).megabytes > 3 << 10


class TestImages:
    async def test_images_come_back_in_order(self, shared: ImageService) -> None:
        files = [png(width, 3, (width, 0, 0)) for width in (30, 10, 20)]
        found = await shared.process([ImagePart(file) for file in files])
        for width, file, image in zip((30, 10, 20), files, found, strict=True):
            assert image.digest == hashlib.blake2b(file, digest_size=32, person=b"\0\x01").digest()
            assert image.num_rows == width
            assert image.grid == (3, width)
            assert image.tensors["pixel_values"].shape == (1, 3, width, 3)
            assert image.tensors["pixel_values"].dtype == numpy.float32
            assert (image.tensors["pixel_values"][..., 0] == width).all()
            assert (image.tensors["halves"] == width).all()
            assert image.tensors["halves"].shape == (width, 3)
            assert image.tensors["image_grid_thw"].tolist() == [[1, 3, width]]
        assert [piece.text for piece in found[0].replacement] == ["[", "<row>", "]\udcff"]

    async def test_options_reach_the_processor(self, shared: ImageService) -> None:
        data = png(20)
        details: list[str | None] = [None, "auto", "high", "original"]
        for detail in details:
            found = await one(shared, data, detail)
            assert (found.bidirectional, found.grid) == (False, None)
        assert (await one(shared, data, "low")).bidirectional
        digests = {(await one(shared, data, detail)).digest for detail in (None, "low")}
        digests |= {image.digest for image in await shared.process([ImagePart(data)] * 2)}
        assert len(digests) == 3

    async def test_data_urls_and_large_files(self, shared: ImageService) -> None:
        data = png(40) + os.urandom(4_000_000)  # behind the image's end, ignored by all decoders
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        async with loop_gap() as gap:
            found = await shared.process([ImagePart(url), ImagePart(data)])
        assert gap.turns > 3
        assert found[0].digest == found[1].digest
        assert found[0].num_rows == 40

    async def test_no_images(self, shared: ImageService) -> None:
        assert await shared.process([]) == []

    async def test_too_many_images(self, make: Make) -> None:
        service = make(max_images=2)
        assert len(await service.process([ImagePart(png(9))] * 2)) == 2
        error = await refused(service, *[png(9)] * 3)
        assert str(error) == "At most 2 image(s) may be provided in one prompt."

    async def test_several_processes_share_the_work(self, make: Make) -> None:
        service = make()
        seen: set[int] = set()
        async with asyncio.timeout(60):
            while len(seen) < 2:
                found = await service.process([ImagePart(png(108))] * 6)
                seen |= {int(image.tensors["process"]) for image in found}
        assert len(service.pool.process_ids) == 2


class TestFailures:
    async def test_a_shape_that_the_model_refuses(self, shared: ImageService) -> None:
        error = await refused(shared, png(101))
        assert str(error) == "the sides of an image differ too much"
        assert not error.unavailable

    async def test_an_error_of_the_processor_is_told_in_fixed_words(
        self, shared: ImageService, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.ERROR):
            error = await refused(shared, png(102))
        assert str(error) == "invalid image: the model cannot take one of 102 x 2 pixels"
        assert "ZeroDivisionError" in caplog.text
        assert not error.unavailable

    @pytest.mark.skipif(sys.platform != "linux", reason="limited by means of /proc")
    async def test_an_image_that_takes_too_much_memory(self, make: Make) -> None:
        service = make()
        error = await refused(service, png(103))
        assert str(error) == "invalid image: it takes more than 256 MB of memory to process"
        assert (await one(service, png(20))).num_rows == 20

    async def test_an_image_that_takes_too_much_time(self, make: Make) -> None:
        service = make(processes=Limits(processes=1, seconds=2, megabytes=256))
        error = await refused(service, png(104))
        assert str(error) == "invalid image: it takes more than 2 s to process"
        assert (await one(service, png(20))).num_rows == 20

    async def test_a_decoder_that_crashes(self, make: Make) -> None:
        service = make()
        error = await refused(service, png(106))
        assert not error.unavailable, "the same image would crash the next one, too"
        assert (await one(service, png(20))).num_rows == 20

    @pytest.mark.parametrize("width", [105, 107])
    async def test_processes_that_are_killed_or_defective(self, make: Make, width: int) -> None:
        service = make()
        error = await refused(service, png(width))
        assert str(error) == "the server failed to process an image"
        assert error.unavailable
        assert (await one(service, png(20))).num_rows == 20

    async def test_one_bad_image_gives_up_the_others(self, make: Make) -> None:
        service = make(processes=Limits(processes=1, seconds=30, megabytes=256))
        async with asyncio.timeout(25):
            await refused(service, b"not an image", png(104))

    async def test_files_that_wait_are_bounded(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        service = make(processes=Limits(processes=1, seconds=3, megabytes=256))
        monkeypatch.setattr(module, "_WAITING_BYTES", 1000)
        slow = asyncio.ensure_future(refused(service, png(104)))
        await asyncio.sleep(0.1)
        error = await refused(service, png(20) + bytes(1000))
        assert str(error) == "too many images are being processed"
        assert error.unavailable
        await slow
        assert (await one(service, png(20) + bytes(1000))).num_rows == 20

    async def test_busy_processes_are_not_waited_for_forever(self, make: Make) -> None:
        service = make(processes=Limits(processes=1, seconds=3, megabytes=256, wait_seconds=0.2))
        slow = asyncio.ensure_future(refused(service, png(104)))
        await asyncio.sleep(0.5)
        error = await refused(service, png(20))
        assert str(error) == "too many images are being processed"
        await slow

    async def test_errors_are_all_of_one_class(self, shared: ImageService) -> None:
        for image in (ImagePart(b""), ImagePart("x"), ImagePart("http://a.b/"), ImagePart(b"x")):
            with pytest.raises(ImageError):
                await shared.process([image])


@pytest.mark.parametrize("name", FILES)
async def test_hostile_files_have_their_answers(shared: ImageService, name: str) -> None:
    """In the child as in :mod:`tests.unit.vision.test_decode`, none an error of the server."""
    make, expected = FILES[name]
    if isinstance(expected, Refused):
        error = await refused(shared, make())
        assert (str(error), error.code, error.unavailable) == (expected.text, expected.code, False)
        return
    found = await one(shared, make())
    width, height = expected.size
    assert found.tensors["pixel_values"].shape == (1, height, width, 3)
    for (x, y), colour in expected.pixels.items():
        pixel = found.tensors["pixel_values"][0, y, x]
        assert abs(pixel - numpy.array(colour)).max() <= expected.difference
