"""Images of requests come out as they went in, and nothing else passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.unit.model_server.fakes import request
from tgi_cli.engine.messages import GenerationRequest, ImageInput
from tgi_cli.rpc import codec
from tgi_cli.rpc import engine_pb2 as pb
from tgi_cli.rpc.image_codec import MOST_IMAGES, ReceivedImages, decode_tensors, encode_tensors

TENSORS = {
    "pixel_values": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "half": np.array([0x3F80, 0xBF80], np.uint16),
    "image_grid_thw": np.array([[1, 2, 3]], np.int64),
    "mask": np.array([[True, False]]),
    "scalar": np.array(7, np.int32),
}


def image(number: int = 1, **fields: Any) -> ImageInput:
    values: dict[str, Any] = {
        "digest": bytes([number]) * 32,
        "spans": ((0, 1),),
        "tensors": TENSORS,
        **fields,
    }
    return ImageInput(**values)


def sent(images: ReceivedImages, asked: GenerationRequest) -> GenerationRequest:
    """The request behind its images, as the model server gets it."""
    for each in asked.images if asked.fork_of is None else ():
        data = encode_tensors(each).SerializeToString()
        message = pb.ClientMessage.FromString(data)
        assert message.WhichOneof("kind") == "tensors"
        images.add(message.tensors)
    return follow(images, asked)


def follow(images: ReceivedImages, asked: GenerationRequest) -> GenerationRequest:
    """The request alone."""
    data = codec.encode_submit(asked).SerializeToString()
    return codec.decode_submit(pb.ClientMessage.FromString(data).submit, images)


def equal(first: ImageInput, second: ImageInput) -> bool:
    same = (first.digest, first.spans, first.grid, first.bidirectional) == (
        second.digest,
        second.spans,
        second.grid,
        second.bidirectional,
    )
    return same and {
        name: (array.dtype, array.shape, array.tobytes()) for name, array in first.tensors.items()
    } == {
        name: (array.dtype, array.shape, array.tobytes()) for name, array in second.tensors.items()
    }


def test_images_survive_the_wire() -> None:
    images = (
        image(1, grid=(2, 3), spans=((0, 4), (5, 2))),
        image(2, spans=((8, 1),), bidirectional=True, tensors={"x": np.ones(3, np.float16)}),
    )
    found = sent(ReceivedImages(), request(1, prompt_ids=tuple(range(20)), images=images))
    assert len(found.images) == 2
    assert all(map(equal, found.images, images))


def test_an_image_that_is_not_contiguous_survives() -> None:
    turned = TENSORS["pixel_values"].transpose(2, 0, 1)
    found = sent(ReceivedImages(), request(1, images=(image(tensors={"x": turned}),)))
    assert np.array_equal(found.images[0].tensors["x"], turned)


def test_an_image_that_is_there_twice_is_sent_once() -> None:
    received = ReceivedImages()
    twice = (image(1, spans=((0, 1),)), image(1, spans=((1, 2),)))
    received.add(encode_tensors(twice[0]).tensors)
    found = follow(received, request(1, images=twice))
    assert all(map(equal, found.images, twice))


def test_the_samples_of_a_prompt_have_its_images() -> None:
    received = ReceivedImages()
    lead = request(1, images=(image(),))
    sent(received, lead)
    for sample in (1, 2):
        found = sent(received, lead.fork(1 + sample, sample))
        assert equal(found.images[0], lead.images[0])


def test_later_images_replace_earlier_ones() -> None:
    received = ReceivedImages()
    sent(received, request(1, images=(image(1),)))
    sent(received, request(2, images=(image(2),)))
    with pytest.raises(ValueError, match="has not sent an image"):
        follow(received, request(3, images=(image(1),)))
    follow(received, request(4, images=(image(2),)))


def test_a_request_without_images_frees_those_before_it() -> None:
    received = ReceivedImages()
    sent(received, request(1, images=(image(1),)))
    sent(received, request(2))
    with pytest.raises(ValueError, match="has not sent an image"):
        follow(received, request(3, images=(image(1),)))


def test_an_invalid_image_fails_its_request_alone() -> None:
    received = ReceivedImages()
    wrong = encode_tensors(image(1))
    wrong.tensors.tensors[0].dtype = "object"
    received.add(wrong.tensors)
    with pytest.raises(ValueError, match="dtype 'object'"):
        follow(received, request(1, images=(image(1),)))
    assert sent(received, request(2, images=(image(2),))).images


def test_a_client_cannot_fill_the_memory_with_images() -> None:
    received = ReceivedImages()
    small = {"x": np.zeros(1, np.uint8)}
    for number in range(MOST_IMAGES + 1):
        digest = number.to_bytes(32, "little")
        received.add(encode_tensors(image(tensors=small, digest=digest)).tensors)
    last = image(digest=MOST_IMAGES.to_bytes(32, "little"))
    with pytest.raises(ValueError, match="has not sent an image"):
        follow(received, request(1, images=(last,)))


def _shorter(tensor: pb.Tensor) -> None:
    tensor.data = tensor.data[:-1]


def _wider(tensor: pb.Tensor) -> None:
    tensor.shape.append(2)


def _huge(tensor: pb.Tensor) -> None:
    tensor.shape.extend([1 << 31] * 3)


def _deep(tensor: pb.Tensor) -> None:
    tensor.shape.extend([1] * 8)


def _code(tensor: pb.Tensor) -> None:
    tensor.dtype = "O"


@pytest.mark.parametrize("change", [_shorter, _wider, _huge, _deep, _code])
def test_tensors_fit_their_data(change: Callable[[pb.Tensor], None]) -> None:
    tensors = encode_tensors(image()).tensors.tensors
    decode_tensors(tensors)
    change(tensors[0])
    with pytest.raises(ValueError, match="a tensor of an image"):
        decode_tensors(tensors)


def test_an_image_has_a_few_tensors_of_different_names() -> None:
    with pytest.raises(ValueError, match="1 to 16 tensors"):
        decode_tensors([])
    tensors = encode_tensors(image()).tensors.tensors
    with pytest.raises(ValueError, match="1 to 16 tensors"):
        decode_tensors([*tensors] * 4)
    with pytest.raises(ValueError, match="twice"):
        decode_tensors([tensors[0], tensors[0]])


@pytest.mark.parametrize(
    ("images", "cause"),
    [
        ([image(spans=())], "no position"),
        ([image(spans=((0, 0),))], "without overlaps"),
        ([image(spans=((2, 2),))], "beyond the prompt's end"),
        ([image(spans=((1, 1), (0, 1)))], "in order"),
        ([image(spans=((0, 2), (1, 1)))], "without overlaps"),
        ([image(spans=((1, 1),)), image(2, spans=((0, 1),))], "in order"),
        ([image(digest=b"short")], "32 bytes"),
        ([image(grid=(2, 2))], "2 x 2"),
    ],
)
def test_positions_fit_the_prompt(images: list[ImageInput], cause: str) -> None:
    received = ReceivedImages()
    for each in images:
        received.add(encode_tensors(each).tensors)
    with pytest.raises(ValueError, match=cause):
        follow(received, replace(request(1), prompt_ids=(3, 4, 5), images=tuple(images)))
