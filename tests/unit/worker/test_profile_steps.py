from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit.worker.test_kv_cache import CONFIG
from tgi_cli.worker.sizing.profile_steps import (
    ONE_THREAD_BYTES,
    WARMUP_BLOCKS,
    part_of_worst,
    threads_for,
    worst_steps,
)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("rows", [1, 2, 300])
@pytest.mark.parametrize("budget", [1, 64, 4096])
@pytest.mark.parametrize(("total", "cacheable"), [(2, 0), (100, 50), (100, 10**6), (2000, 10**6)])
def test_the_steps_keep_to_the_limits(device, rows, budget, total, cacheable):
    config = replace(
        CONFIG,
        device=device,
        max_batch_size=rows,
        max_batch_prefill_tokens=budget,
        max_total_tokens=total,
    )
    for step in worst_steps(config, cacheable):
        assert 0 < len(step.rows) <= rows
        assert len(set(step.rows)) == len(step.rows)
        for row, new, start, count in zip(
            step.rows, step.new, step.starts, step.counts, strict=True
        ):
            assert row == new.row < rows
            assert start >= 0
            assert count >= 1
            assert start + count == len(new.token_ids) < total
            assert len(new.block_ids) == -(-len(new.token_ids) // config.block_size)
            assert set(new.block_ids) <= set(range(WARMUP_BLOCKS))
        assert all(step.samples)
        assert all(count == 1 for count in step.counts[: step.num_decodes])


@pytest.mark.tgi_pain(2)
def test_every_budget_is_spent():
    config = replace(CONFIG, device="cuda", max_batch_size=8, max_total_tokens=4000)
    alone, mixed, single = worst_steps(config, 10**6)
    assert alone.num_tokens == config.max_batch_prefill_tokens
    assert alone.starts[-1] + alone.counts[-1] == 3999, "the chunk ends the longest context"
    assert len(mixed.rows) == 8
    assert mixed.num_decodes == 7
    assert mixed.num_tokens == config.max_batch_prefill_tokens
    assert mixed.starts[0] == 3998
    assert single.num_tokens == 1


def test_a_part_that_is_computed_at_once_fills_a_budget_beside_decodes():
    config = replace(CONFIG, device="cuda", max_batch_size=8, max_total_tokens=9000)
    _, mixed, _ = worst_steps(config, 10**6, spans=True)
    assert mixed.num_decodes == 7
    assert mixed.num_tokens == config.max_batch_prefill_tokens + 7


def test_a_cpu_runs_one_step_of_a_known_part():
    config = replace(CONFIG, device="cpu", max_batch_size=128, max_batch_prefill_tokens=512)
    (step,) = worst_steps(config, 10**6)
    assert part_of_worst(config) == 4
    assert len(step.rows) == 128 / 4
    assert step.num_tokens == 512 / 4
    assert part_of_worst(replace(config, device="cuda")) == 1


@pytest.mark.parametrize(
    ("device", "weight_bytes", "threads"),
    [("cpu", ONE_THREAD_BYTES, 1), ("cpu", ONE_THREAD_BYTES + 1, 3), ("cuda", 1, 3)],
)
def test_a_small_model_is_warmed_up_by_one_thread(device, weight_bytes, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with threads_for(weight_bytes, torch.device(device)):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
