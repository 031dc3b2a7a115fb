"""From 8-bit pixels to the values that an encoder takes.

An image processor rescales and normalizes each pixel by itself, so 256 values of each channel say
all. They come from the processor's own methods, so results are equal bit for bit, without the four
arrays of 4 and 8 bytes a pixel that these methods make of a whole image.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

CHANNELS = 3
DTYPES = ("float32", "float16", "bfloat16")
_BLOCK = 1 << 17
"""Pixels that are looked up at once: numpy turns the indices into 8 bytes each."""


def value_table(processor: Any, dtype: str) -> np.ndarray:
    """What a transformers image processor makes of each 8-bit value: [3, 256].

    Args:
        dtype: One of ``DTYPES``; bfloat16 is returned as uint16.
    """
    values: np.ndarray = np.broadcast_to(np.arange(256, dtype=np.uint8), (CHANNELS, 1, 256))
    if processor.do_rescale:
        values = processor.rescale(values, processor.rescale_factor)
    if processor.do_normalize:
        values = processor.normalize(values, processor.image_mean, processor.image_std)
    table = np.ascontiguousarray(values, np.float32).reshape(CHANNELS, 256)
    return bfloat16_bits(table) if dtype == "bfloat16" else table.astype(dtype)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """The bits of finite float32 values as bfloat16, rounded to nearest even: uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def normalized(pixels: np.ndarray, table: np.ndarray, axis: int) -> np.ndarray:
    """The values of 8-bit pixels, in the same shape.

    Args:
        table: From :func:`value_table`.
        axis: That of the channels in ``pixels``.
    """
    shape = pixels.shape
    if pixels.dtype != np.uint8 or shape[axis] != CHANNELS:
        raise TypeError(f"expected 8-bit RGB, not {pixels.dtype} {shape}")
    before = math.prod(shape[: axis % len(shape)])
    source = np.ascontiguousarray(pixels).reshape(before, CHANNELS, -1)
    found = np.empty(source.shape, table.dtype)
    step = max(1, _BLOCK // max(1, source.shape[2]))
    for start in range(0, before, step):
        block = slice(start, start + step)
        for channel, values in enumerate(table):
            found[block, channel] = values[source[block, channel]]
    return found.reshape(shape)
