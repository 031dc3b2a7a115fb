"""Images of prompts: valid, distinct, repeated as often as asked for."""

from __future__ import annotations

import base64
import io
from itertools import islice

import numpy as np
import pytest
from PIL import Image

from tgi_cli.bench.events import BenchRequest
from tgi_cli.bench.load.sender import ConversationState
from tgi_cli.bench.workloads.images import ImageWorkload, random_png, with_images
from tgi_cli.errors import ConfigError

TEXT = BenchRequest(prompt="What?", prompt_tokens=2, max_tokens=4)


@pytest.mark.parametrize(
    ("text", "images"),
    [
        ("1", ImageWorkload(1, 512, 512)),
        ("3x640x480", ImageWorkload(3, 640, 480)),
        ("1x1920x1080:0.5", ImageWorkload(1, 1920, 1080, 0.5)),
    ],
)
def test_images_are_parsed(text: str, images: ImageWorkload) -> None:
    assert ImageWorkload.parse(text) == images
    assert ImageWorkload.parse(str(images)) == images


@pytest.mark.parametrize(
    "text", ["", "0", "1x0x5", "1x5", "x5x5", "1x20000x5", "1x5x5:2", "1x5x5:.", "-1", "5000"]
)
def test_images_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--images"):
        ImageWorkload.parse(text)


@pytest.mark.parametrize("size", [(1, 1), (7, 9), (64, 40), (1920, 1080)])
def test_a_png_has_blocks_of_random_colors(size: tuple[int, int]) -> None:
    data = random_png(np.random.default_rng(1), *size)
    image = Image.open(io.BytesIO(data), formats=["PNG"]).convert("RGB")
    assert image.size == size
    pixels = np.asarray(image)
    corners = pixels[::8, ::8]
    whole = corners.repeat(8, axis=0).repeat(8, axis=1)[: size[1], : size[0]]
    assert np.array_equal(pixels, whole)
    count = corners.shape[0] * corners.shape[1]
    assert len(np.unique(corners.reshape(-1, 3), axis=0)) > 0.9 * count
    assert len(data) < 250_000


def images_of(workload: ImageWorkload, seed: int = 0, count: int = 60) -> list[str]:
    requests = with_images([TEXT] * count, workload, seed)
    return [url for request in requests for url in request.images]


def test_images_are_distinct_unless_they_are_to_repeat() -> None:
    found = images_of(ImageWorkload(2, 16, 16))
    assert len(found) == len(set(found)) == 120
    assert found == images_of(ImageWorkload(2, 16, 16)), "the same seed, the same images"
    assert not set(found) & set(images_of(ImageWorkload(2, 16, 16), seed=1))
    repeated = images_of(ImageWorkload(1, 16, 16, 0.5), count=400)
    assert len(set(repeated)) == pytest.approx(200, abs=50)


def test_the_first_turn_of_a_conversation_has_images() -> None:
    turns = [
        BenchRequest(prompt="a", prompt_tokens=1, max_tokens=1, conversation=number // 2)
        for number in range(6)
    ]
    found = list(with_images(turns, ImageWorkload(1, 8, 8), 0))
    assert [len(request.images) for request in found] == [1, 0, 1, 0, 1, 0]


def test_images_come_before_the_text() -> None:
    (request,) = islice(with_images([TEXT], ImageWorkload(2, 8, 8), 0), 1)
    first, second = request.images
    assert base64.b64decode(first.removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")
    state = ConversationState()
    assert state.prompt("generate_stream", request) == f"![]({first})![]({second})What?"
    (message,) = state.prompt("chat", request)
    assert isinstance(message, dict)
    assert message["role"] == "user"
    assert [part["type"] for part in message["content"]] == ["image_url", "image_url", "text"]
    assert message["content"][1]["image_url"] == {"url": second}
    assert message["content"][2]["text"] == "What?"
