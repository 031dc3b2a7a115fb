"""Weights in the order of our Triton kernels, without memory, for compiling the kernels."""

from __future__ import annotations

import torch

from tgi_cli.quantization.tiled_weight import E2M1, E4M3, INTEGER, TABLE, TiledWeight

KINDS = {
    "int4": (INTEGER, 4, 64, 2, torch.float16),
    "int4 with minima": (INTEGER, 4, 32, 1, torch.float32),
    "int4 in groups of 32": (INTEGER, 4, 32, 1, torch.float16),
    "int8": (INTEGER, 8, 128, 0, torch.float32),
    "int8 with minima": (INTEGER, 8, 32, 1, torch.float32),
    "int8 in groups of 32": (INTEGER, 8, 32, 1, torch.float16),
    "int8 in groups of 16": (INTEGER, 8, 16, 1, torch.float32),
    "mxfp4": (E2M1, 4, 32, 1, torch.uint8),
    "nvfp4": (E2M1, 4, 16, 1, torch.float32),
    "nf4": (TABLE, 4, 64, 1, torch.float32),
    "e4m3": (E4M3, 8, 128, 1, torch.float32),
    "e4m3 with e4m3": (E4M3, 8, 128, 1, torch.float32),
}
"""Form, bits, depth, steps and the dtype of scales."""

ZEROS = {
    "int4": torch.uint8,
    "int4 in groups of 32": torch.uint8,
    "int4 with minima": torch.float32,
    "int8 with minima": torch.float32,
}
"""The dtype of zeros, where there are any."""


def empty_weight(
    kind: str, experts: int = 1, outputs: int = 4096, inputs: int = 4096
) -> TiledWeight:
    """A weight of a kind, with zeros or minima where :data:`ZEROS` has their dtype."""
    form, bits, depth, steps, scales = KINDS[kind]
    blocks = inputs // depth // (8 // bits)
    groups = inputs // depth // steps if steps else 1
    return TiledWeight(
        torch.empty(1, 1, 1, 1, dtype=torch.uint8).expand(experts, blocks, outputs, depth),
        torch.empty(1, 1, 1, dtype=scales).expand(experts, groups, outputs),
        torch.empty(1, 1, 1, dtype=ZEROS[kind]) if kind in ZEROS else None,
        torch.empty(16) if form == TABLE else None,
        form,
        bits,
        steps,
        kind == "e4m3 with e4m3",
    )
