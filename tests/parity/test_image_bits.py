"""Prompts with images: cuts, company and other images beside them change no bit on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.families import make_checkpoint, random_ids
from tests.parity.vision import VisionOracle
from tests.parity.vision_cases import IMAGE, VISION_CASES
from tests.tools.image_prompts import ImagePrompt
from tests.tools.paged_run import PagedRun, kernels_add_up_rows_alike, load
from tgi_cli.models.vision import ImageFeatures

NAMES = ("SmolVLM", "Mistral Small 3", "Qwen3-VL", "Gemma 3")
"""Of plain rows, lines of them, features behind layers, and tokens that attend to each other."""

CHUNKS = (3, 1, 5, 2, 1, 30, 4, 1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_neither_cuts_nor_other_prompts_change_a_bit(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    if not kernels_add_up_rows_alike(dtype):
        pytest.skip("the products of this processor depend on the number of rows")
    case = VISION_CASES[name]
    path = make_checkpoint(case.case, tmp_path / "model")
    oracle, model = VisionOracle(path, case), load(path, dtype)
    assert model.vision is not None
    images = [case.image(seed) for seed in case.seeds]
    features = [model.vision.encode(image, None) for image in images]
    again = model.vision.encode(images[0], None)
    assert torch.equal(again.rows, features[0].rows), "an image is encoded alone"

    def prompt(order: tuple[int | None, ...], seed: int) -> ImagePrompt:
        parts: list[list[int] | ImageFeatures] = [
            random_ids(9, seed=seed + place) if index is None else features[index]
            for place, index in enumerate(order)
        ]
        given = [images[index] for index in order if index is not None]
        return oracle.prepared(ImagePrompt.of(parts, IMAGE), given)

    own, other = prompt((None, 0, None, 1, None), 0), prompt((None, 1, None), 50)
    end = len(own.ids)
    alone = PagedRun(model, dtype, None).step({"a": own.ids}, images={"a": own.chunk(0, end)})["a"]
    run = PagedRun(model, dtype, None)
    pieces, start = [], 0
    for number in range(end):
        stop = own.end(start, CHUNKS[number % len(CHUNKS)])
        tokens = {"a": own.ids[start:stop], "text": random_ids(1, seed=number)}
        chunks = {"a": own.chunk(start, stop)}
        if number % 2:
            tokens[f"other {number}"] = other.ids
            chunks[f"other {number}"] = other.chunk(0, len(other.ids))
        pieces.append(run.step(tokens, images=chunks)["a"])
        start = stop
        if start == end:
            break
    assert len(pieces) > 2
    assert torch.equal(torch.cat(pieces), alone)
