"""Towers that are interrupted within layers: the same features, to the last bit."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.families import make_checkpoint
from tests.parity.vision_cases import VISION_CASES
from tests.tools.paged_run import CPU
from tgi_cli.kernels import cpp_library
from tgi_cli.models import load_model, read_config
from tgi_cli.models.hf import tower_pieces
from tgi_cli.models.hf.tower_attention import tower_attention
from tgi_cli.models.hf.tower_pieces import pieces
from tgi_cli.models.vision import PausePoints

needs_kernels = pytest.mark.skipif(cpp_library() is None, reason="no kernels")


class Watched(PausePoints):
    """Counts the points that are come to."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.check = self.one_more

    def one_more(self) -> None:
        self.count += 1


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few rows."""
    monkeypatch.setattr(tower_pieces, "PIECE_OPERATIONS", 1.0)
    monkeypatch.setattr(tower_pieces, "LEAST_ROWS", 5)


@needs_kernels
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    "name", ["SmolVLM", "Qwen2.5-VL", "Qwen3-VL", "Mistral Small 3", "Gemma 3", "InternVL 3"]
)
def test_features_of_a_run_in_pieces_are_the_same(name: str, tmp_path: Path) -> None:
    case = VISION_CASES[name]
    model = load_model(read_config(make_checkpoint(case.case, tmp_path)), torch.bfloat16, CPU)
    tower = model.vision
    assert tower is not None
    for seed in case.seeds:
        image = case.image(seed)
        wanted = tower.encode(image, None)
        watched = Watched()
        tower.pauses.check = watched.one_more
        found = tower.encode(image, None)
        tower.pauses.check = None
        assert torch.equal(found.rows, wanted.rows)
        for level, other in zip(found.deepstack, wanted.deepstack, strict=True):
            assert torch.equal(level, other)
        assert watched.count > 8 * tower.calls(image), "products and attention are in pieces"


@needs_kernels
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    "bounds", [[0, 70], [0, 16, 32, 48, 64, 70], [0, 1, 12, 13, 13, 70], [0, 3, 6, 9, 12]]
)
def test_pieces_of_attention_see_all_of_their_windows(bounds: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    count = bounds[-1]
    query, key, value = torch.randn(3, 1, 2, count, 72, generator=generator).bfloat16().unbind()
    starts = torch.tensor(bounds, dtype=torch.int32)
    module: Any = torch.nn.Identity()
    wanted, _ = tower_attention(
        module, query, key, value, None, cu_seq_lens_q=starts, is_causal=False
    )
    module.pause_points = watched = Watched()
    found, _ = tower_attention(
        module, query, key, value, None, cu_seq_lens_q=starts, is_causal=False
    )
    assert torch.equal(found, wanted)
    assert watched.count == 1 + -(-count // 5)


def test_a_piece_has_rows_enough_to_be_worth_it() -> None:
    found = list(pieces(1000, 4e6))
    assert [(piece.start, piece.stop) for piece in found] == [*pairwise((0, 250, 500, 750, 1000))]
    assert [piece.stop - piece.start for piece in pieces(100, 1e12)] == [64, 36]
