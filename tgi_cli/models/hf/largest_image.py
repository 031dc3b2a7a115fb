"""Images as their processors would make them, of any content, to measure what the largest costs.

No pixel is 0, as some encoders leave out what is padding. Sizes come from the configuration: the
model's process has no image processor that could be asked.
"""

from __future__ import annotations

from collections.abc import Container
from math import isqrt
from typing import Any

import torch
from torch import Tensor

TILES = 17
"""The most tiles of an image, the small whole image included: 4 x 4 and 1 (Idefics 3, SmolVLM)."""


def largest_image(config: Any, names: Container[str], max_rows: int) -> dict[str, Tensor]:
    """The encoder's inputs for the largest image of about ``max_rows`` tokens at most.

    If all images of the family are larger, those for the smallest.

    Args:
        config: configuration of transformers' model.
        names: arguments of its ``get_image_features``.
        max_rows: at least 1.
    """
    eye = config.vision_config
    patch = _first(eye.patch_size)
    if "image_grid_thw" in names:
        merge = eye.spatial_merge_size
        height, width = _sides(max_rows, merge)
        frames = getattr(eye, "temporal_patch_size", None)
        shape: tuple[int, ...] = (_channels(eye), patch, patch)  # of an image (PaddleOCR-VL)
        if frames is not None:
            shape = (_channels(eye) * _first(frames) * patch**2,)
        grid = torch.tensor([[1, height, width]])
        return {"pixel_values": torch.ones(height * width, *shape), "image_grid_thw": grid}
    if "image_position_ids" in names:
        height, width = _sides(max_rows, eye.pooling_kernel_size)
        places = torch.cartesian_prod(torch.arange(width), torch.arange(height))
        values = torch.ones(1, height * width, _channels(eye) * patch**2)
        return {"pixel_values": values, "image_position_ids": places[None]}
    if eye.model_type == "pixtral":
        sides = _sides(max_rows, getattr(config, "spatial_merge_size", 1))
        height, width = (min(side * patch, eye.image_size) for side in sides)
        values = torch.ones(1, _channels(eye), height, width)
        return {"pixel_values": values, "image_sizes": torch.tensor([[height, width]])}
    size, pinpoints = _first(eye.image_size), getattr(config, "image_grid_pinpoints", None)
    if pinpoints and "image_sizes" in names:
        per_tile = (size // patch) ** 2
        shapes = sorted((h // size * (w // size) + 1, h, w) for h, w in pinpoints)
        fitting = [shape for shape in shapes if shape[0] * per_tile <= max_rows] or shapes[:1]
        tiles, height, width = fitting[-1]
        values = torch.ones(1, tiles, _channels(eye), size, size)
        return {"pixel_values": values, "image_sizes": torch.tensor([[height, width]])}
    if config.model_type == "idefics2":  # cut into four, beside the whole
        tiles = 5 if max_rows >= 5 * config.perceiver_config.resampler_n_latents else 1
        return {"pixel_values": torch.ones(1, tiles, _channels(eye), size, size)}
    tiles = min(TILES, max(1, max_rows // max(1, _tile_rows(config, size, patch))))
    if config.model_type in ("idefics3", "smolvlm"):
        return {"pixel_values": torch.ones(1, tiles, _channels(eye), size, size)}
    tiles = tiles if config.model_type == "internvl" else 1
    return {"pixel_values": torch.ones(tiles, _channels(eye), size, size)}


def _tile_rows(config: Any, size: int, patch: int) -> int:
    """Tokens of a tile whose rows and columns are shuffled into channels."""
    scale = getattr(config, "scale_factor", None) or 1 / getattr(config, "downsample_ratio", 1.0)
    return int((size // patch / scale) ** 2)


def _sides(max_rows: int, merge: int) -> tuple[int, int]:
    """Height and width in patches of the squarest image of at most so many merged ones."""
    width = isqrt(max_rows)
    return max_rows // width * merge, width * merge


def _channels(eye: Any) -> int:
    for name in ("in_channels", "num_channels", "in_chans"):
        channels = getattr(eye, name, None)
        if channels is not None:
            return int(channels)
    return 3


def _first(sizes: Any) -> int:
    """A size, or its first number if each side has its own."""
    return int(sizes[0]) if isinstance(sizes, list | tuple) else int(sizes)
