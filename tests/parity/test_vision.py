"""Vision-language models answer to prompts with images as transformers' implementations do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.families import TOLERANCE, make_checkpoint
from tests.parity.vision import VisionOracle, check_vision
from tests.parity.vision_cases import VISION_CASES
from tests.tools.paged_run import CPU
from tgi_cli.models import load_model, read_config
from tgi_cli.models.image_support import IMAGE_ARCHITECTURES

COMPARED = [name for name, case in VISION_CASES.items() if case.case.model in IMAGE_ARCHITECTURES]


@pytest.mark.parametrize("name", COMPARED)
def test_prompts_with_images_have_transformers_logits(name: str, tmp_path: Path) -> None:
    case = VISION_CASES[name]
    result = check_vision(case, make_checkpoint(case.case, tmp_path / "model"))
    assert result.max_feature_difference < TOLERANCE
    assert result.max_logit_difference < TOLERANCE
    assert result.sharded_logit_difference < TOLERANCE
    assert 0.5 < result.logit_std < 5, "the tolerance is to mean something"
    assert result.image_effect > 0.05, "an answer is to depend on what is seen"
    assert result.identical == result.compared
    assert result.builtin == case.builtin


def test_an_image_of_one_row_has_what_the_projector_makes_of_it(tmp_path: Path) -> None:
    """transformers drops the first dimension of the rows of Mistral 3, which is then that row."""
    case = VISION_CASES["Mistral Small 3"]
    path = make_checkpoint(case.case, tmp_path / "model")
    core = VisionOracle(path, case).model.model
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    image = {"pixel_values": pixels, "image_sizes": torch.tensor([[28, 28]])}
    with torch.inference_mode():
        seen = core.vision_tower(**image, output_hidden_states=True)
        hidden = seen.hidden_states[core.config.vision_feature_layer].squeeze(0)
        wanted = core.multi_modal_projector(hidden, image["image_sizes"])
    tower = load_model(read_config(path), torch.float32, CPU).vision
    assert tower is not None
    rows = tower.encode(image, 1).rows
    assert rows.shape == wanted.shape == (1, 64)
    assert (rows - wanted).abs().max() < TOLERANCE


def test_every_architecture_that_is_given_images_is_compared() -> None:
    assert {VISION_CASES[name].case.model for name in COMPARED} == IMAGE_ARCHITECTURES


@pytest.mark.parametrize("name", COMPARED)
def test_towers_in_bfloat16_are_near_to_those_in_float32(name: str, tmp_path: Path) -> None:
    case = VISION_CASES[name]
    path = make_checkpoint(case.case, tmp_path / "model")
    image = case.image(0)
    rows = len(VisionOracle(path, case).features(image))
    exact, rounded = (
        tower.encode(image, rows)
        for tower in (
            load_model(read_config(path), dtype, CPU).vision
            for dtype in (torch.float32, torch.bfloat16)
        )
        if tower is not None
    )
    assert rounded.rows.dtype == torch.bfloat16
    assert len(rounded.deepstack) == len(exact.deepstack)
    for ours, wanted in zip(
        (rounded.rows, *rounded.deepstack), (exact.rows, *exact.deepstack), strict=True
    ):
        assert (ours.float() - wanted).pow(2).mean() < (0.1 * wanted.std()) ** 2
