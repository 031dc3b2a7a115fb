"""Steps that are timed keep to the limits, and what they read is what there is to read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.checkpoints import make_llama
from tests.unit.worker.test_kv_cache import CONFIG
from tgi_cli.config import ServeConfig
from tgi_cli.engine.step import Step, StepResult
from tgi_cli.models import load_model, read_config
from tgi_cli.worker.sizing import step_timing
from tgi_cli.worker.sizing.kv_cache import Capacity
from tgi_cli.worker.sizing.step_timing import (
    Decode,
    Prefill,
    StepTimer,
    measure,
    read_rate,
)


class Recorder:
    """A worker that keeps book: which positions of which rows have been computed."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.tables: dict[int, list[int]] = {}
        self.known: dict[int, int] = {}
        self.waiting = 0
        self.most_waiting = 0

    def launch(self, step: Step) -> Step:
        config = self.capacity.config
        assert 0 < step.num_tokens - step.num_decodes <= config.max_batch_prefill_tokens or (
            step.num_tokens == step.num_decodes > 0
        )
        for new in step.new:
            assert max(new.block_ids) < self.capacity.num_blocks
            self.tables[new.row], self.known[new.row] = list(new.block_ids), 0
        assert len(set(step.rows)) == len(step.rows) <= config.max_batch_size
        for row, start, count in zip(step.rows, step.starts, step.counts, strict=True):
            assert row < config.max_batch_size
            assert start <= self.known[row], "nothing is left out before it"
            end = start + count
            assert end < config.max_total_tokens
            assert end <= len(self.tables[row]) * config.block_size
            self.known[row] = end
        held = [block for row in step.rows for block in self.tables[row]]
        assert len(set(held)) == len(held), "rows have blocks of their own"
        return step

    def sample(self, handle: Any, masks: Any = None) -> Recorder:
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        return self

    def wait(self) -> StepResult:
        self.waiting -= 1
        return StepResult([], [], [], [])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("limits", "lengths", "sizes"),
    [
        ({}, [128, 512, 1024], [1, 2, 4, 8]),
        ({"num_blocks": 40}, [128, 512], [1, 2, 4]),
        ({"max_batch_size": 5}, [128, 512, 1024], [1, 2, 4]),
        ({"max_total_tokens": 60, "max_input_tokens": 59}, [59], [1, 2, 4, 8]),
        ({"max_total_tokens": 3, "max_input_tokens": 2}, [2], [1, 2, 4, 8]),
        ({"max_batch_prefill_tokens": 7}, [128, 512, 1024], [1, 2, 4, 8]),
    ],
)
def test_all_that_the_limits_allow_is_timed(
    device: str, limits: dict[str, int], lengths: list[int], sizes: list[int]
) -> None:
    config = replace(
        CONFIG,
        device=device,
        **{
            "max_batch_size": 8,
            "max_total_tokens": 2000,
            "max_input_tokens": 1999,
            "max_batch_prefill_tokens": 64,
            **{name: limit for name, limit in limits.items() if name != "num_blocks"},
        },
    )
    capacity = Capacity(
        config=config,
        num_blocks=limits.get("num_blocks", 120),
        cache_bytes=0,
        weight_bytes=0,
        activation_bytes=0,
        load_seconds=0,
        warmup_seconds=0,
    )
    worker = Recorder(capacity)
    watch = StepTimer(worker, capacity)
    prefills = list(watch.prefills())
    assert [prefill.tokens for prefill in prefills] == lengths
    decodes = list(watch.decodes())
    assert [decode.batch_size for decode in decodes] == sizes
    assert {decode.context for decode in decodes} == {
        min(128, max(1, config.max_total_tokens - 25))
    }
    assert all(timed.seconds > 0 for timed in [*prefills, *decodes])
    assert worker.waiting == 0
    assert worker.most_waiting == (1 if device == "cpu" or decodes[0].context == 1 else 2)
    assert [d.batch_size for d in watch.decodes([3, 1000])] == ([3] if max(sizes) >= 3 else [])


def test_rates_count_all_tokens() -> None:
    assert Prefill(100, 0.5).tokens_per_second == 200
    assert Decode(8, 128, 0.1).tokens_per_second == pytest.approx(80)


@pytest.mark.parametrize("tied", [True, False])
def test_a_decode_reads_all_weights_but_the_embeddings(tmp_path: Path, tied: bool) -> None:
    path = make_llama(tmp_path / "llama", tie_word_embeddings=tied)
    model = load_model(read_config(path), torch.float32, torch.device("cpu"))
    table = 256 * 64 * 4
    assert model.bytes_read(1) == model.weight_bytes - (0 if tied else table)


def test_the_memory_bandwidth_is_measured() -> None:
    assert 1e8 < read_rate(torch.device("cpu")) < 1e13


def test_warming_up_a_model_times_its_steps_and_saves_its_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tgi_cli.worker.sizing.step_timing.read_rate", lambda device: 1e9)
    monkeypatch.setattr(step_timing, "_SECONDS", 0.01)
    path = make_llama(tmp_path / "llama")
    serve = ServeConfig(
        model_id="tiny", dtype="float32", max_batch_prefill_tokens=64, max_batch_size=4
    )
    said: list[str] = []
    found = measure(serve, path, None, said.append)
    assert [row["tokens"] for row in found["prefill"]] == [128]
    assert [row["batch_size"] for row in found["decode"]] == [1, 2, 4]
    assert (found["kv_blocks"], found["max_batch_total_tokens"]) == (160, 2560)
    assert (found["state_slots"], found["state_bytes"]) == (0, 0)
    first = found["decode"][0]
    kv = 2 * 3 * 2 * 16 * 4 * first["context"]
    assert first["bytes_read"] == pytest.approx(found["weight_bytes"] + kv, rel=0.3)
    assert first["memory_share"] == pytest.approx(
        first["bytes_read"] / first["seconds"] / 1e9, rel=1e-3
    )
    assert Path(found["kept"]).is_relative_to(tmp_path / "tgi" / "limits")
    assert "running the worst steps" in said
