"""Images whose rows are numbers that only the right pixels give, in the place of token ids.

What the fake model computes of a prompt with images is what it computes of the prompt as it is
*seen*: with a number in place of each id that stands for a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from tgi_cli.engine.messages import GenerationRequest, ImageInput
from tgi_cli.sampling.params import SamplingParams

IMAGE_ID = 1500
"""Beyond the fake model's vocabulary."""


def image(
    pixels: bytes, *spans: tuple[int, int], bidirectional: bool = False, **more: Any
) -> ImageInput:
    rows = sum(count for _, count in spans)
    return ImageInput(
        digest=blake2b(pixels + bytes([rows]), digest_size=32).digest(),
        spans=spans,
        tensors={"pixels": pixels},
        bidirectional=bidirectional,
        **more,
    )


def features(pixels: bytes, rows: int) -> list[int]:
    """What the fake encoder gives."""
    return [_number(pixels + bytes([rows, row])) for row in range(rows)]


def image_request(
    request_id: int, prompt: Sequence[int], new: int, *images: ImageInput, **more: Any
) -> GenerationRequest:
    """A request whose prompt has images at some of its positions."""
    ids = list(prompt)
    for each in images:
        for start, count in each.spans:
            ids[start : start + count] = [IMAGE_ID] * count
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=tuple(ids),
        sampling=SamplingParams(temperature=0.0),
        max_new_tokens=new,
        images=images,
        **more,
    )


def seen(sent: GenerationRequest, whole: bool = False) -> list[int]:
    """The prompt as the fake model sees it; ``whole``: every token sees all of it."""
    ids = list(sent.prompt_ids)
    for each in sent.images:
        rows = iter(features(each.tensors["pixels"], each.num_rows))
        for start, count in each.spans:
            ids[start : start + count] = [next(rows) for _ in range(count)]
    if whole:
        ids[0] = _number(repr(ids).encode())
    return ids


def _number(content: bytes) -> int:
    """Unlike any token id."""
    return 1 << 31 | int.from_bytes(blake2b(content, digest_size=3).digest(), "little")
