"""The process that serves: decoding and a family's preprocessing together."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.tools.image_models import write_image_model
from tests.unit.vision.hostile_files import FILES, MAX_PIXELS, Refused, corner, written
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.text.images import ImagePart
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.vision.image_format import ImageFormat
from tgi_cli.vision.images import ImageError, ImageOptions
from tgi_cli.vision.limits import ImageLimits
from tgi_cli.vision.model_formats import image_format
from tgi_cli.vision.processing import image_processor
from tgi_cli.vision.service import ImageService

LIMITS = ImageLimits(max_image_pixels=MAX_PIXELS, image_workers=1)


class Served:
    """A family's miniature, with a service of its own."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = write_image_model(name, folder)
        self.format: ImageFormat = image_format(self.folder, Tokenizer.load(self.folder))
        self.service = ImageService(self.folder, self.format, LIMITS, dtype="bfloat16")


@pytest.fixture(scope="module", params=["SmolVLM", "Qwen2.5-VL"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    served = Served(request.param, tmp_path_factory.mktemp("model"))
    yield served
    served.service.close()


def test_the_processor_is_described(served: Served) -> None:
    own = image_processor(served.folder, served.format, None, "bfloat16")
    assert served.service.max_rows == own.max_rows
    assert served.service.largest_image == own.largest_image()
    assert served.service.note == own.note


@pytest.mark.parametrize("detail", [None, "low"])
async def test_images_are_those_of_the_processor(served: Served, detail: str | None) -> None:
    data = written(corner(size=(900, 700)), "PNG")
    options = ImageOptions(low_detail=detail == "low", several=True)
    own = image_processor(served.folder, served.format, None, "bfloat16")
    with Image.open(io.BytesIO(data)) as image:
        expected = own.process(image.convert("RGB"), options, own.digest(data, options))
    for found in await served.service.process([ImagePart(data, detail)] * 2):
        assert found.digest == expected.digest
        assert found.replacement == expected.replacement
        assert found.grid == expected.grid
        assert list(found.tensors) == list(expected.tensors)
        for name, tensor in expected.tensors.items():
            np.testing.assert_array_equal(found.tensors[name], tensor)
            assert found.tensors[name].dtype == tensor.dtype


async def test_hostile_files_are_no_errors_of_the_server(served: Served) -> None:
    pids = served.service.pool.process_ids
    for name, (make, expected) in FILES.items():
        (found,) = await asyncio.gather(
            served.service.process([ImagePart(make())]), return_exceptions=True
        )
        if isinstance(expected, Refused):
            assert str(found) == expected.text, name
        elif isinstance(found, ImageError):
            assert "cannot take" in str(found), f"{name}: the family refuses its shape"
        else:
            assert not isinstance(found, BaseException), name
            assert found[0].num_rows > 0
    assert served.service.pool.process_ids == pids, "no process was lost"


def test_a_folder_without_a_processor(tmp_path: Path) -> None:
    folder = write_image_model("SmolVLM", tmp_path)
    found = image_format(folder, Tokenizer.load(folder))
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(UnsupportedModelError, match=r"^this model takes no images: "):
        ImageService(folder, found, LIMITS)
