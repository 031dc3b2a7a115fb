"""Images of requests to protobuf and back.

The arrays of an image are megabytes. They are sent ahead of the request, each image by itself, so
that neither encoding nor sending them holds an event loop for long; the samples of a prompt are
further requests with the same images. What arrives was written by another process, perhaps on
another machine: everything that the engine relies on is checked here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from tgi_cli.engine.messages import ImageInput
from tgi_cli.rpc import engine_pb2 as pb

DIGEST_BYTES = 32
MOST_IMAGES = 1024
"""Images that a client may send ahead of a request."""
MOST_TENSORS = 16
"""Tensors of one image; the encoders of transformers take up to six."""
MOST_DIMENSIONS = 8
_BYTES = {
    **{"bool": 1, "uint8": 1, "float16": 2, "uint16": 2},
    **{"float32": 4, "int32": 4, "int64": 8},
}
"""Bytes of a number, by the dtypes that tensors may have."""

Tensors = Mapping[str, Any]
"""numpy arrays by the names of the encoder's arguments."""


def encode_tensors(image: ImageInput) -> pb.ClientMessage:
    """Encode the tensors of an image, 0.5 ms per MB. Any thread may call it."""
    tensors = [
        pb.Tensor(name=name, dtype=array.dtype.name, shape=array.shape, data=array.tobytes())
        for name, array in image.tensors.items()
    ]
    return pb.ClientMessage(tensors=pb.ImageTensors(digest=image.digest, tensors=tensors))


def encode_images(images: Sequence[ImageInput]) -> list[pb.Image]:
    """Encode the images of a request without their tensors."""
    return [
        pb.Image(
            digest=image.digest,
            span_starts=[start for start, _ in image.spans],
            span_counts=[count for _, count in image.spans],
            grid_height=image.grid[0] if image.grid else 0,
            grid_width=image.grid[1] if image.grid else 0,
            bidirectional=image.bidirectional,
        )
        for image in images
    ]


class ReceivedImages:
    """The images that a client has sent ahead, for its next requests."""

    def __init__(self) -> None:
        self._tensors: dict[bytes, Tensors | str] = {}
        """Tensors by digest, or the error if they are invalid."""
        self._used = False
        """A request has followed them."""

    def add(self, message: pb.ImageTensors) -> None:
        """Take the tensors of an image. Errors are reported to its requests."""
        if self._used:
            self._tensors, self._used = {}, False
        if len(self._tensors) < MOST_IMAGES:
            try:
                self._tensors[message.digest] = decode_tensors(message.tensors)
            except ValueError as error:
                self._tensors[message.digest] = str(error)

    def of(self, messages: Sequence[pb.Image], prompt_tokens: int) -> tuple[ImageInput, ...]:
        """The images of the next request.

        Args:
            messages: Its images.
            prompt_tokens: Length of its prompt.

        Raises:
            ValueError: Something does not fit.
        """
        if not messages:
            self._tensors = {}
            return ()
        self._used = True
        images = []
        end = 0
        for message in messages:
            spans = tuple(zip(message.span_starts, message.span_counts, strict=True))
            for start, count in spans:
                if start < end or not count:
                    raise ValueError("the images of a prompt must be in order, without overlaps")
                end = start + count
            images.append(
                ImageInput(
                    digest=_digest(message),
                    spans=spans,
                    tensors=self._of(message.digest),
                    grid=_grid(message),
                    bidirectional=message.bidirectional,
                )
            )
        if end > prompt_tokens:
            raise ValueError(f"an image lies beyond the prompt's end ({prompt_tokens} tokens)")
        return tuple(images)

    def _of(self, digest: bytes) -> Tensors:
        found = self._tensors.get(digest)
        if found is None:
            raise ValueError("the client has not sent an image of the request")
        if isinstance(found, str):
            raise ValueError(found)
        return found


def _digest(message: pb.Image) -> bytes:
    if len(message.digest) != DIGEST_BYTES:
        raise ValueError(f"the digest of an image must have {DIGEST_BYTES} bytes")
    return message.digest


def _grid(message: pb.Image) -> tuple[int, int] | None:
    grid = message.grid_height, message.grid_width
    rows = sum(message.span_counts)
    if not rows:
        raise ValueError("an image has no position in the prompt")
    if grid == (0, 0):
        return None
    if prod(grid) != rows:
        raise ValueError(f"an image of {grid[0]} x {grid[1]} tokens has {rows} positions")
    return grid


def decode_tensors(messages: Sequence[pb.Tensor]) -> Tensors:
    """Decode the tensors of an image: read-only views of the messages' bytes.

    Raises:
        ValueError: A name, a dtype or a shape is invalid, or does not fit the data.
    """
    # A router only encodes: numpy would cost it 15 MB.
    import numpy as np

    if not 0 < len(messages) <= MOST_TENSORS:
        raise ValueError(f"an image must have 1 to {MOST_TENSORS} tensors, not {len(messages)}")
    tensors: dict[str, Any] = {}
    for message in messages:
        size = _BYTES.get(message.dtype)
        if size is None:
            raise ValueError(f"a tensor of an image has the dtype {message.dtype[:20]!r}")
        if len(message.shape) > MOST_DIMENSIONS:
            raise ValueError(f"a tensor of an image has more than {MOST_DIMENSIONS} dimensions")
        needed = prod(message.shape) * size
        if needed != len(message.data):
            raise ValueError(
                f"a tensor of an image has {len(message.data)} bytes instead of {needed}"
            )
        if message.name in tensors:
            raise ValueError(f"an image has the tensor {message.name[:40]!r} twice")
        flat = np.frombuffer(message.data, np.dtype(message.dtype).newbyteorder("<"))
        tensors[message.name] = flat.reshape(tuple(message.shape))
    return tensors
