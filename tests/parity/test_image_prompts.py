"""Prompts with real images, from text and pixels to greedy tokens, against transformers.

The other side is transformers' own processor and model, which know nothing of ours.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.parity.families import make_checkpoint
from tests.parity.test_processed_images import PROCESSORS, SERVED
from tests.parity.vision_cases import VISION_CASES
from tests.tools.image_models import IMAGE_MODELS, OracleProcessor, write_image_model
from tgi_cli.llm import LLM

VOCABULARY = 320
CONTEXT = 512
"""A quarter of it is enough for an image, so that none is shrunk."""
NEW = 10
ARGUMENTS: dict[str, dict[str, Any]] = {
    "Idefics 2": {"image_seq_len": 3},
    "LLaVA 1.5": {"patch_size": 7},
    "LLaVA-NeXT": {"patch_size": 7},
    "LLaVA-NeXT-Video": {"patch_size": 7},
    "ViP-LLaVA": {"patch_size": 7},
    "DeepSeek-VL": {"num_image_tokens": 16},
    "Janus": {"num_image_tokens": 16},
    "LLaVA-OneVision": {"num_image_tokens": 16, "vision_aspect_ratio": "anyres_max_9"},
    "Pixtral": {"patch_size": 14},
}
"""Of transformers' processor, for the case's tower."""
PROMPTS = {"{} What is it?": 1, "First {}, then\n\n{}\n. Which?": 2}


def checkpoint(name: str, path: Path) -> Path:
    """A miniature with the tokenizer and the image processor of its kind."""
    kind, settings = PROCESSORS[name]
    case = VISION_CASES[name].case
    write_image_model(kind, path / "ids")
    ids = json.loads((path / "ids" / "config.json").read_text())
    context = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    text = {**case.values["text_config"], **context}
    known = {key: ids[key] for key in IMAGE_MODELS[kind].ids}
    values = {**case.values, "text_config": text, **known}
    for key in ("video_token_id", "video_token_index"):
        if key in values:
            values[key] = VOCABULARY - 1
    folder = make_checkpoint(replace(case, values=values), path / "model")
    config = json.loads((folder / "config.json").read_text())
    return write_image_model(kind, folder, config, **settings)


def noise(seed: int) -> Image.Image:
    size = ((60, 90), (31, 80))[seed]
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8))


def generated(
    name: str, folder: Path, oracle: OracleProcessor, prompt: str, images: Any, **options: Any
) -> list[list[int]]:
    """What transformers' ``generate`` returns with these options, without the prompt."""
    kind = getattr(transformers, VISION_CASES[name].case.model)
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    known = inspect.signature(inspect.unwrap(kind.forward)).parameters
    inputs = {
        key: torch.from_numpy(np.asarray(value))
        for key, value in oracle(prompt, images).items()
        if key in known
    }
    # No end token: random weights choose any.
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        found = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options)
    answers: list[list[int]] = found[:, inputs["input_ids"].shape[1] :].tolist()
    return answers


@pytest.mark.parametrize("name", SERVED)
def test_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = checkpoint(name, tmp_path)
    kind = PROCESSORS[name][0]
    oracle = OracleProcessor(kind, folder, **ARGUMENTS.get(name, {}))
    token = IMAGE_MODELS[kind].written.rstrip("\n")
    limits: dict[str, Any] = {"max_total_tokens": CONTEXT - 1, "max_batch_total_tokens": 1024}
    with LLM(folder, dtype="float32", **limits) as llm:
        for prompt, count in PROMPTS.items():
            images = [noise(seed) for seed in range(count)]
            text = prompt.replace("{}", token)
            (answer,) = llm.generate(
                {"prompt": text, "images": images}, max_new_tokens=NEW, ignore_eos=True
            )
            (wanted,) = generated(name, folder, oracle, text, images)
            assert answer.token_ids == wanted
