"""Processed images between processes."""

from __future__ import annotations

import json

import numpy
import pytest

from tgi_cli.vision.images import ProcessedImage, PromptPiece
from tgi_cli.vision.packing import decode_job, encode_job, pack, unpack


def test_jobs_have_a_head_and_a_file() -> None:
    head = encode_job(job="process", low_detail=True)
    assert decode_job(head + b"the file") == ({"job": "process", "low_detail": True}, b"the file")
    assert decode_job(encode_job(a="ü")) == ({"a": "ü"}, b"")


@pytest.mark.parametrize("grid", [None, (3, 4)])
def test_images_are_unpacked_as_they_were(grid: tuple[int, int] | None) -> None:
    tensors = {
        "floats": numpy.arange(24, dtype=numpy.float32).reshape(2, 3, 4),
        "transposed": numpy.arange(6, dtype=numpy.uint16).reshape(2, 3).T,
        "odd": numpy.arange(5, dtype=numpy.uint8),
        "integers": numpy.array([[1, -2, 1 << 40]]),
        "scalar": numpy.array(7),
        "none": numpy.zeros((2, 0), numpy.float32),
        "halves": numpy.array([0.5], numpy.float16),
    }
    image = ProcessedImage(
        digest=bytes(range(32)),
        tensors=tensors,
        replacement=(PromptPiece("a"), PromptPiece("<x>", 12), PromptPiece("ü")),
        grid=grid,
        bidirectional=grid is None,
    )
    fields, buffers = pack(image)
    data = bytearray(b"".join(map(bytes, buffers)))
    found = unpack(json.loads(json.dumps(fields)), data)
    assert (found.digest, found.replacement) == (image.digest, image.replacement)
    assert (found.grid, found.bidirectional, found.num_rows) == (grid, image.bidirectional, 12)
    assert list(found.tensors) == list(tensors)
    for name, tensor in tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert found.tensors[name].shape == tensor.shape
        assert (found.tensors[name] == tensor).all()
        assert found.tensors[name].flags.writeable
    assert numpy.shares_memory(found.tensors["floats"], numpy.frombuffer(data, numpy.uint8))
