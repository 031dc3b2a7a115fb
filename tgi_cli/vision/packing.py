"""Processed images between the child that computes them and the server, without JSON of pixels."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from tgi_cli.vision.images import ProcessedImage, PromptPiece

_ALIGNMENT = 64
_LENGTH = struct.Struct("<I")


def encode_job(**job: Any) -> bytes:
    """A job's head: its length and JSON; the bytes of a file follow it."""
    head = json.dumps(job).encode()
    return _LENGTH.pack(len(head)) + head


def decode_job(body: bytes) -> tuple[dict[str, Any], bytes]:
    """The fields of a job, and the bytes of its file."""
    (length,) = _LENGTH.unpack_from(body)
    start = _LENGTH.size + length
    return json.loads(body[_LENGTH.size : start]), body[start:]


def pack(image: ProcessedImage) -> tuple[dict[str, Any], list[Any]]:
    """An image as JSON values, and the contents of its tensors one after the other."""
    import numpy

    tensors, buffers, start = [], [], 0
    for name, tensor in image.tensors.items():
        array = numpy.ascontiguousarray(tensor)
        tensors.append((name, array.dtype.str, tensor.shape, start))
        padding = -array.nbytes % _ALIGNMENT
        buffers += [array.reshape(-1).view(numpy.uint8).data, bytes(padding)]
        start += array.nbytes + padding
    fields = {
        "digest": image.digest.hex(),
        "tensors": tensors,
        "replacement": [(piece.text, piece.rows) for piece in image.replacement],
        "grid": image.grid,
        "bidirectional": image.bidirectional,
    }
    return fields, buffers


def unpack(fields: Mapping[str, Any], data: bytes | bytearray) -> ProcessedImage:
    """The image that :func:`pack` was given; its tensors are views of ``data``."""
    import numpy

    tensors = {}
    for name, kind, shape, start in fields["tensors"]:
        dtype = numpy.dtype(kind)
        count = int(numpy.prod(shape, dtype=numpy.int64))
        tensors[name] = numpy.frombuffer(data, dtype, count, start).reshape(shape)
    grid = fields["grid"]
    return ProcessedImage(
        digest=bytes.fromhex(fields["digest"]),
        tensors=tensors,
        replacement=tuple(PromptPiece(text, rows) for text, rows in fields["replacement"]),
        grid=None if grid is None else (grid[0], grid[1]),
        bidirectional=fields["bidirectional"],
    )
