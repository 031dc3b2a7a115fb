"""CPU time of preprocessing a photo of 1920 x 1080, beside transformers' image processors.

``python -m tests.benchmarks.image_processing`` prints a row for each family: the smallest CPU time
of several runs, in a process without torch.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tgi_cli.vision.image_format import ImageFormat
from tgi_cli.vision.images import ImageOptions
from tgi_cli.vision.processing import hide_torch, image_processor

SIZE = (1920, 1080)
RUNS = 5
_TOKENS = {name: name for name in ("fake", "global", "break", "end", "start")}


@dataclass(frozen=True)
class Shape:
    """A published model's settings.

    Attributes:
        calls: What transformers' whole processor tells its image processor.
    """

    family: str
    preprocessor: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, Any] = field(default_factory=dict)


SHAPES = {
    "SmolVLM": Shape(
        "idefics3",
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 2048},
            "max_image_size": {"longest_edge": 512},
        },
        {"vision_config": {"patch_size": 16}, "scale_factor": 4},
    ),
    "Qwen2.5-VL": Shape(
        "qwen2_vl",
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": 3136,
            "max_pixels": 12845056,
        },
    ),
    "Gemma 3": Shape(
        "gemma3",
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 896, "width": 896},
        },
    ),
    "Gemma 4": Shape("gemma4", {"image_processor_type": "Gemma4ImageProcessor"}),
    "Mistral Small 3.1": Shape(
        "pixtral",
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 1540}},
        {"model_type": "mistral3", "vision_config": {"patch_size": 14}},
        {"patch_size": 28},
    ),
    "InternVL 3": Shape(
        "internvl",
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 448, "width": 448}},
        calls={"crop_to_patches": True},
    ),
    "LLaVA-OneVision": Shape(
        "llava_onevision",
        {"image_processor_type": "LlavaOnevisionImageProcessor"},
        {
            "model_type": "llava_onevision",
            "vision_config": {"model_type": "siglip_vision_model", "patch_size": 14},
        },
    ),
}


def photo() -> Image.Image:
    """An image with details of eight pixels."""
    random = np.random.default_rng(0)
    small = (SIZE[1] // 8, SIZE[0] // 8, 3)
    image = Image.fromarray(random.integers(0, 256, small, np.uint8))
    return image.resize(SIZE, Image.Resampling.BICUBIC)


def milliseconds(work: Callable[[], Any]) -> float:
    """The smallest CPU time of several runs."""
    times = []
    for _ in range(RUNS):
        begun = time.process_time()
        work()
        times.append(time.process_time() - begun)
    return min(times) * 1e3


def main() -> None:
    hide_torch()
    from transformers import AutoImageProcessor

    loader: Any = AutoImageProcessor
    image = photo()
    print("| model | rows | bytes, bfloat16 | CPU ms | transformers' |\n|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        own = ImageFormat(
            family=shape.family,
            placeholder="<image>",
            text="<image>",
            row_token="<image>",
            placeholder_id=0,
            tokens=_TOKENS,
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            (path / "config.json").write_text(json.dumps(shape.config))
            (path / "preprocessor_config.json").write_text(json.dumps(shape.preprocessor))
            ours = image_processor(path, own, dtype="bfloat16")
            theirs = loader.from_pretrained(folder, backend="pil")
        found = ours.process(image, ImageOptions(), bytes(32))
        size = found.tensors["pixel_values"].nbytes / 1e6
        took = milliseconds(lambda ours=ours: ours.process(image, ImageOptions(), bytes(32)))
        beside = milliseconds(
            lambda theirs=theirs, calls=shape.calls: theirs(image, return_tensors="np", **calls)
        )
        print(f"| {name} | {found.num_rows:,} | {size:.1f} MB | {took:.0f} | {beside:.0f} |")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"peak memory {peak} MB; torch imported: {sys.modules.get('torch') is not None}")


if __name__ == "__main__":
    main()
