"""Images made up to measure an encoder are images that it takes, about as large as asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.families import make_checkpoint
from tests.parity.vision_cases import VISION_CASES
from tgi_cli.models import load_model, read_config
from tgi_cli.models.image_support import IMAGE_ARCHITECTURES

NAMES = [name for name, case in VISION_CASES.items() if case.case.model in IMAGE_ARCHITECTURES]


@pytest.mark.parametrize("name", NAMES)
def test_an_image_of_any_size_is_encoded(name: str, tmp_path: Path) -> None:
    path = make_checkpoint(VISION_CASES[name].case, tmp_path / "model")
    tower = load_model(read_config(path), torch.float32, torch.device("cpu")).vision
    assert tower is not None
    rows = {}
    for most in (1, 30, 200):
        image = dict(tower.largest(most))
        rows[most] = len(tower.encode(image, None).rows)
        assert all(each.isfinite().all() for each in image.values())
    assert rows[1] <= rows[30] <= rows[200]
    smallest = rows[1]
    for most in (30, 200):
        # Lines of tiles may have a token more each.
        assert rows[most] <= max(1.2 * most, smallest)
