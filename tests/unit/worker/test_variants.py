"""Warm-up launches every variant of every kernel: none is compiled while requests wait."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.triton_process import needs_triton, run_tests
from tests.unit.worker.test_kv_cache import CONFIG
from tgi_cli.worker.sizing.variants import powers_of_two, variant_steps


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_variant_is_compiled_after_warmup() -> None:
    run_tests([Path(__file__).parent / "triton_variants.py"], interpret=False, timeout=580)


@pytest.mark.parametrize("spans", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 300])
@pytest.mark.parametrize("budget", [1, 64, 5000])
@pytest.mark.parametrize(("total", "blocks"), [(2, 1), (100, 7), (5000, 400), (5000, 10**5)])
def test_the_steps_keep_to_the_limits(
    rows: int, budget: int, total: int, blocks: int, spans: bool
) -> None:
    config = replace(
        CONFIG, max_batch_size=rows, max_batch_prefill_tokens=budget, max_total_tokens=total
    )
    steps = list(variant_steps(config, blocks, spans))
    seen = [step for step in steps if any(new.images for new in step.new)]
    assert bool(seen) == spans
    if spans and min(budget, total) > 16:
        assert {step.num_tokens > 16 for step in seen} == {True, False}
    for step in steps:
        assert 0 < len(step.rows) <= rows
        assert step.num_prefill_tokens <= budget
        assert all(count == 1 for count in step.counts[: step.num_decodes])
        for new, start, count in zip(step.new, step.starts, step.counts, strict=True):
            assert start >= 0
            assert start + count == len(new.token_ids) < total
            assert 0 <= min(new.block_ids) <= max(new.block_ids) < blocks


def test_adapters_are_used_where_there_are_slots() -> None:
    for adapters in (False, True):
        steps = list(variant_steps(CONFIG, 100, adapters=adapters))
        used = {new.adapter_slot for step in steps for new in step.new}
        assert used == ({-1, 0} if adapters else {-1})


def test_the_sizes_are_powers_of_two_and_the_limit() -> None:
    assert list(powers_of_two(1)) == [1]
    assert list(powers_of_two(8)) == [1, 2, 4, 8]
    assert list(powers_of_two(11)) == [1, 2, 4, 8, 11]
