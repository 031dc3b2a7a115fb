"""Compare the time to encode a photo with transformers', on the same cores.

    python -m tests.benchmarks.towers [MODEL ...] [--rounds 3] [--tiles 13] [--threads N]

Towers have published sizes and random weights in bfloat16; decoders are one small layer. Both
sides are given the same tensors, those of a photo of 1920 x 1080 pixels, and take turns in one
process; figures are medians of processor time, and the largest difference of rows beside their
standard deviation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.parity.cases import SMALL
from tgi_cli.models import load_model, read_config

CPU = torch.device("cpu")

_QWEN_GRID = (78, 138)
"""Patches of 14 pixels of a photo of 1080 lines."""

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolVLM-256M": (
        "Idefics3",
        {
            "text_config": SMALL | {"model_type": "llama", "hidden_size": 576, "head_dim": 64},
            "vision_config": {
                "hidden_size": 768,
                "intermediate_size": 3072,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "image_size": 512,
                "patch_size": 16,
            },
            "scale_factor": 4,
            "image_token_id": 250,
        },
    ),
    "Qwen2.5-VL-3B": (
        "Qwen2_5_VL",
        {
            "text_config": SMALL
            | {
                "hidden_size": 2048,
                "num_attention_heads": 16,
                "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]},
            },
            "vision_config": {
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "out_hidden_size": 2048,
            },
            "image_token_id": 250,
        },
    ),
}
"""Classes and configurations of published towers."""


def image_of(name: str, tiles: int) -> dict[str, Tensor]:
    """What a processor makes of the photo; of SmolVLM's tiles, the first."""
    generator = torch.Generator().manual_seed(0)
    if name.startswith("SmolVLM"):
        pixels = torch.randn(1, tiles, 3, 512, 512, generator=generator)
        mask = torch.ones(1, tiles, 512, 512, dtype=torch.int64)
        return {"pixel_values": pixels, "pixel_attention_mask": mask}
    height, width = _QWEN_GRID
    return {
        "pixel_values": torch.randn(height * width, 3 * 2 * 14 * 14, generator=generator),
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }


def compare(name: str, rounds: int, tiles: int) -> str:
    """A row of the table."""
    family, values = SHAPES[name]
    config = getattr(transformers, f"{family}Config")(**values)
    kind: Any = getattr(transformers, f"{family}ForConditionalGeneration")
    image = image_of(name, tiles)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        theirs = kind(config).to(torch.bfloat16).eval()
        theirs.save_pretrained(folder)
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "bfloat16"}))
        ours = load_model(read_config(Path(folder)), torch.bfloat16, CPU).vision
        assert ours is not None
        given = {k: v.bfloat16() if v.is_floating_point() else v for k, v in image.items()}

        def reference() -> Tensor:
            found = theirs.model.get_image_features(**given, return_dict=True).pooler_output
            return torch.cat([each.flatten(0, -2) for each in found])

        rows = len(reference())
        wanted, got = reference(), ours.encode(given, rows).rows
        taken = [
            (_seconds(lambda: ours.encode(given, rows)), _seconds(reference)) for _ in range(rounds)
        ]
    mine, others = (statistics.median(each) for each in zip(*taken, strict=True))
    off = (got.float() - wanted.float()).abs().max() / wanted.float().std()
    return f"| {name} | {rows} | {mine:.2f} | {others:.2f} | {others / mine:.2f} | {off:.2f} |"


def _seconds(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiles", type=int, default=13)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    print("| tower | rows | ours, CPU s | transformers, CPU s | ratio | difference |")
    print("|---|---|---|---|---|---|")
    for name in options.models or SHAPES:
        print(compare(name, options.rounds, options.tiles), flush=True)


if __name__ == "__main__":
    main()
