"""What warm-up finds of images: their time beside a prompt's tokens, and their memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.worker.fake_tower import WIDTH, TinyTower
from tests.unit.worker.test_kv_cache import CONFIG
from tgi_cli.device.distributed import ALONE
from tgi_cli.engine.step import Step
from tgi_cli.errors import OutOfMemoryError
from tgi_cli.worker.images import ImageEncoder
from tgi_cli.worker.sizing import image_cost
from tgi_cli.worker.sizing.image_cost import ImageCost, ImageCostMeter, max_image_rows

ROW_BYTES = 2 * WIDTH * 4
"""Of features and one level of deepstack."""


class Clock:
    """Advances by a second for each layer and for each 10 tokens of a prompt."""

    def __init__(self, tower: TinyTower) -> None:
        self.tower = tower
        self.tokens = 0
        self.steps = 0

    def run(self, step: Step) -> None:
        self.steps += 1
        # The first step initialises something.
        self.tokens += step.num_tokens + (1000 if self.steps == 1 else 0)

    def __call__(self) -> float:
        return sum(layer.passed for layer in self.tower.layers) + self.tokens / 10


def measure(monkeypatch: pytest.MonkeyPatch, tower: TinyTower, config: Any = CONFIG) -> ImageCost:
    clock = Clock(tower)
    monkeypatch.setattr(image_cost.time, "perf_counter", clock)
    encoder = ImageEncoder(tower, torch.device("cpu"))
    try:
        found = ImageCostMeter(config, tower, encoder, clock.run, ALONE).measure()
        assert encoder.held_rows == 0, "nothing is left behind"
        assert encoder.failure(0) is None
        return found
    finally:
        encoder.close()


def test_a_rows_cost_is_its_encoders_time_by_that_of_a_token(monkeypatch):
    """20 layers of the largest image of 249 rows, at a second each; a token takes 0.1 s."""
    tower = TinyTower(20)
    found = measure(monkeypatch, tower)
    assert max_image_rows(CONFIG) == 249
    assert found.row_cost == pytest.approx(20 / 249 / 0.1, abs=2e-3)
    assert (found.layers, found.row_bytes) == (20, ROW_BYTES)
    assert found.limits.layers == 20
    assert found.limits.cache_rows == found.cache_rows


def test_of_the_largest_image_a_cpu_runs_few_layers(monkeypatch):
    tower = TinyTower(20)
    measure(monkeypatch, tower)
    assert [len(seen["pixel_values"]) for seen in tower.seen] == [2, 249]
    assert [layer.passed for layer in tower.layers] == [2, 2] + [1] * 18


def test_streams_wait_for_what_each_further_token_takes(monkeypatch):
    found = measure(monkeypatch, TinyTower(20)).limits
    assert found.token_seconds == pytest.approx(0.1)
    assert found.step_seconds == pytest.approx(0.1)
    assert found.interrupts


@pytest.mark.parametrize(("layers", "smallest"), [(2, 2), (20, 576)])
def test_what_is_quick_or_of_one_size_is_encoded_whole(monkeypatch, layers, smallest):
    tower = TinyTower(layers)
    tower.smallest = smallest
    found = measure(monkeypatch, tower)
    rows = max(249, smallest)
    assert found.row_cost == pytest.approx(layers / rows / 0.1, abs=2e-3)
    assert len({layer.passed for layer in tower.layers}) == 1


@pytest.mark.parametrize(("kept", "rows"), [(0, 249), (300 * ROW_BYTES + 5, 300)])
def test_features_are_kept_of_one_largest_image_at_least(monkeypatch, kept, rows):
    monkeypatch.setattr(image_cost, "CACHE_BYTES", kept)
    found = measure(monkeypatch, TinyTower())
    assert found.cache_rows == rows
    assert found.total_bytes == found.activation_bytes + rows * ROW_BYTES


def test_what_cannot_be_measured_is_guessed(monkeypatch, caplog):
    tower = TinyTower()
    tower.failure = ValueError("the image cannot be encoded (of no such size)")
    found = measure(monkeypatch, tower)
    assert found.row_cost == image_cost.GUESSED_ROW_COST
    assert found.cache_rows >= max_image_rows(CONFIG)
    assert "of no such size" in caplog.text


def test_an_image_that_does_not_fit_into_memory_is_an_error(monkeypatch):
    tower = TinyTower()
    tower.failure = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
    with pytest.raises(OutOfMemoryError, match="9 GiB") as caught:
        measure(monkeypatch, tower)
    assert "--max-input-tokens" in caught.value.remedy


def test_short_prompts_have_small_images():
    assert max_image_rows(replace(CONFIG, max_input_tokens=2)) == 1
