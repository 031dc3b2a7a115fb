"""Collected by test_variants.py: what warm-up compiles, against what random steps ask for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.parity.cases import CASES
from tests.tools.checkpoints import make_llama
from tests.tools.triton_stub import StubGPU, stub_gpu
from tests.unit.worker.fakes import CPU
from tests.unit.worker.test_kv_cache import CONFIG
from tgi_cli.attention import create_attention
from tgi_cli.engine.step import NewRow, Step
from tgi_cli.models import load_model, model_facts, read_config
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.runner import ModelRunner
from tgi_cli.worker.sizing.profile_steps import add_row, with_slots
from tgi_cli.worker.sizing.variants import variant_steps
from tgi_cli.worker.upload import Uploader

ROWS, LONGEST, BUDGET, BLOCK = 24, 4000, 600, 16
NUM_BLOCKS, NUM_SLOTS = 64, 4
LIMITS = replace(
    CONFIG,
    max_batch_size=ROWS,
    max_total_tokens=LONGEST,
    max_batch_prefill_tokens=BUDGET,
    block_size=BLOCK,
)
MODELS = ["Llama", "Qwen 3 MoE", "Qwen 3.5", "Gemma 2"]


@pytest.fixture(scope="module", params=MODELS)
def warm(request: Any, tmp_path_factory: Any) -> Iterator[tuple[ModelRunner, StubGPU, int]]:
    """A model on a GPU that is not there, after warm-up; its number of state slots."""
    folder: Path = tmp_path_factory.mktemp("model")
    if request.param == "Llama":
        make_llama(folder, max_position_embeddings=LONGEST)
    else:
        from tests.parity.families import make_checkpoint

        case = CASES[request.param]
        values = dict(case.values) | {"max_position_embeddings": LONGEST}
        folder = make_checkpoint(replace(case, values=values), folder, seed=3)
    config = read_config(folder)
    model = load_model(config, torch.float16, CPU, load_format="dummy")
    with stub_gpu() as gpu:
        attention = create_attention(
            "triton", model.kv_specs, BLOCK, torch.float16, CPU, states=model.state_specs
        )
        attention.allocate(NUM_BLOCKS)
        slots = 0
        if attention.states is not None:
            slots = NUM_SLOTS
            attention.states.allocate(slots)
        rows = InputBatch(ROWS, LONGEST, BLOCK, Uploader(CPU, packed=True))
        vocab_size = model_facts(config).vocab_size
        runner = ModelRunner(model, attention, rows, vocab_size)
        for step in variant_steps(LIMITS, NUM_BLOCKS):
            run(runner, step, slots)
        yield runner, gpu, slots


def run(runner: ModelRunner, step: Step, slots: int) -> None:
    runner.sample(runner.launch(with_slots(step, slots))).wait()


entries = st.lists(
    st.tuples(
        st.integers(1, LONGEST - 1),
        st.one_of(st.just(1), st.integers(1, 80), st.integers(1, BUDGET)),
    ),
    min_size=1,
    max_size=ROWS,
)
"""KV lengths, and how many of their tokens are computed."""
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7]),
    seed=st.just(1),
    top_k=st.sampled_from([0, 7]),
    top_p=st.sampled_from([0.9, 1.0]),
)


def step_of(chosen: list[tuple[int, int]], sampling: SamplingParams) -> Step:
    step, left = Step(0), BUDGET
    counts = [min(count, end) for end, count in chosen]
    order = sorted(range(len(chosen)), key=lambda index: counts[index] > 1)
    step.num_decodes = sum(count == 1 for count in counts)
    for row, index in enumerate(order):
        end, count = chosen[index][0], counts[index]
        if count > 1:
            count = min(count, left)
            left -= count
            if not count:
                break
        blocks = [block % NUM_BLOCKS for block in range(-(-end // BLOCK))]
        step.new.append(NewRow(row, row, [0] * end, end, blocks, sampling))
        add_row(step, row, end - count, count)
    return step


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(entries, samplings)
def test_random_steps_ask_for_nothing_new(
    warm: tuple[ModelRunner, StubGPU, int],
    chosen: list[tuple[int, int]],
    sampling: SamplingParams,
) -> None:
    runner, gpu, slots = warm
    known = len(gpu.variants)
    assert known > 5
    run(runner, step_of(chosen, sampling), slots)
    assert gpu.variants[known:] == []
