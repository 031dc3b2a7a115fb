"""Towers take what preprocessing gives, and make of it what they make of transformers' tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.parity.families import TOLERANCE, make_checkpoint
from tests.parity.vision import VisionOracle
from tests.parity.vision_cases import VISION_CASES
from tests.tools.image_models import OracleProcessor, write_image_model
from tests.tools.paged_run import CPU
from tgi_cli.models import load_model, read_config
from tgi_cli.models.image_support import IMAGE_ARCHITECTURES
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.vision.images import ImageOptions
from tgi_cli.vision.model_formats import image_format
from tgi_cli.vision.processing import image_processor

_TILE = {"height": 28, "width": 28}
_GRID = {"patch_size": 4, "size": {"shortest_edge": 256, "longest_edge": 40 * 64}}
_VIDEO = _GRID | {"size": {"shortest_edge": 512, "longest_edge": 80 * 64}}
_FRAMES = {"size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28}}
_PIXTRAL = {"size": {"longest_edge": 84}}
_PATCHES = {"Pixtral": 14, "Mistral 3": 28}

PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolVLM": ("Idefics 3", _FRAMES),
    "SmolVLM 2": ("SmolVLM", _FRAMES),
    "Idefics 2": ("Idefics 2", {"size": {"shortest_edge": 21, "longest_edge": 42}}),
    "LLaVA 1.5": ("LLaVA 1.5", {}),
    "LLaVA-NeXT": ("LLaVA-NeXT", {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}),
    "LLaVA-OneVision": (
        "LLaVA-OneVision",
        {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
    ),
    "Pixtral": ("Pixtral", _PIXTRAL),
    "Mistral Small 3": ("Mistral 3", _PIXTRAL),
    "LightOnOCR": ("LightOnOCR", _PIXTRAL),
    "InternVL 3": ("InternVL", {"size": _TILE}),
    "Aya Vision": ("Aya Vision", {"size": _TILE}),
    "Qianfan-OCR": ("Qianfan-OCR", {"size": _TILE}),
    "LLaVA-NeXT-Video": (
        "LLaVA-NeXT",
        {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
    ),
    "ViP-LLaVA": ("LLaVA 1.5", {}),
    "DeepSeek-VL": ("DeepSeek-VL", {"size": _TILE}),
    "Janus": ("Janus", {"size": _TILE}),
    "GLM-4.5V": ("GLM-4.1V", _VIDEO),
    "GLM-OCR": ("GLM-4.6V", _VIDEO),
    "PaddleOCR-VL": ("PaddleOCR-VL", _GRID),
    "EXAONE 4.5": ("Qwen2-VL", _GRID),
    "HyperCLOVA X SEED": ("Qwen2-VL", _GRID),
    "LFM3-VL": ("Qwen2-VL", _GRID),
    "Qwen2-VL": ("Qwen2-VL", _GRID),
    "Qwen2.5-VL": ("Qwen2.5-VL", _GRID),
    "Qwen3-VL": ("Qwen3-VL", _GRID),
    "Qwen 3.5": ("Qwen 3.5", _GRID),
    "GLM-4.1V": ("GLM-4.1V", _VIDEO),
    "GLM-4.6V": ("GLM-4.6V", _VIDEO),
    "Gemma 3": ("Gemma 3", {"size": _TILE}),
    "Gemma 4": ("Gemma 4", {"patch_size": 4, "max_soft_tokens": 70}),
    "PaliGemma": ("PaliGemma", {"size": _TILE, "image_seq_length": 16}),
}
"""By case: the kind of image processor, and its settings for the case's tower."""

SERVED = [
    name
    for name in PROCESSORS
    if name in VISION_CASES and VISION_CASES[name].case.model in IMAGE_ARCHITECTURES
]
SIZES = [(90, 60), (31, 80), (30, 9)]


@pytest.mark.parametrize("name", SERVED)
def test_rows_of_a_tower_are_as_many_as_counted(name: str, tmp_path: Path) -> None:
    case = VISION_CASES[name]
    folder = make_checkpoint(case.case, tmp_path)
    kind, settings = PROCESSORS[name]
    model = load_model(read_config(folder), torch.float32, CPU)
    oracle = VisionOracle(folder, case)
    config = json.loads((folder / "config.json").read_text())
    write_image_model(kind, folder, config, **settings)
    processor = image_processor(folder, image_format(folder, Tokenizer.load(folder)))
    theirs = OracleProcessor(kind, folder)
    assert model.vision is not None
    options = [ImageOptions()] + [ImageOptions(several=True)] * (kind == "LLaVA-OneVision")
    for seed, size in enumerate(SIZES):
        pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
        image = Image.fromarray(pixels)
        for option in options:
            found = processor.process(image, option, bytes(32))
            features = model.vision.encode(
                {key: torch.from_numpy(own) for key, own in found.tensors.items()}, found.num_rows
            )
            assert len(features.rows) == found.num_rows
            if option.several:
                continue
            settings = _kwargs(kind, theirs) | {"return_tensors": "pt"}
            inputs = theirs.image_processor(image, **settings)
            wanted = oracle.features({key: inputs[key] for key in found.tensors})
            assert (features.rows - wanted).abs().max() < TOLERANCE


def _kwargs(kind: str, oracle: OracleProcessor) -> dict[str, Any]:
    """What the whole processor tells its image processor."""
    if kind in _PATCHES:
        return {"patch_size": _PATCHES[kind]}
    return dict(getattr(oracle.processor, "images_kwargs", {}))
