"""Collected by test_variants.py: what warm-up compiles, against what random steps ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.parity.cases import CASES
from tests.tools.checkpoints import make_llama
from tests.tools.tiled_weights import KINDS, empty_weight
from tests.tools.triton_stub import StubGPU, stub_gpu
from tests.unit.worker.fakes import CPU
from tests.unit.worker.test_kv_cache import CONFIG
from tgi_cli.attention import create_attention
from tgi_cli.device.distributed import ALONE
from tgi_cli.engine.step import NO_EXTRAS, NewRow, OptionalOutputs, RowImage, Step, TokenAppend
from tgi_cli.layers.triton_grouped import triton_grouped_linear
from tgi_cli.layers.triton_lora import add_
from tgi_cli.layers.triton_sort import sort_pairs
from tgi_cli.models import CausalLM, load_model, model_facts, read_config
from tgi_cli.quantization.few_rows import MAX_CLASS, FewRows, rows_class
from tgi_cli.quantization.tiled_weight import ExpertRows
from tgi_cli.quantization.triton_dense import few_rows_product
from tgi_cli.quantization.triton_product import triton_product
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.runner import ModelRunner
from tgi_cli.worker.sizing.product_choice import dense_layers, gated_product
from tgi_cli.worker.sizing.profile_steps import add_row, with_slots
from tgi_cli.worker.sizing.variants import powers_of_two, variant_steps
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
MODELS: dict[str, torch.dtype | None] = {
    "Llama": None,
    "Qwen 3 MoE": torch.float8_e4m3fn,
    "Qwen 3.5": None,
    "Gemma 3 with images": torch.float8_e5m2,
    "DeepSeek V3": torch.float8_e4m3fn,
    "gpt-oss": None,
}
"""Experts, states, windows and images whose tokens see each other, latents, sinks; with the dtype
of the cache."""

OWN_PRODUCTS = {each: each % 3 > 0 for each in range(MAX_CLASS + 1) if each != 3}
"""Classes of rows that our kernel multiplies with dense weights, and whether it begins early."""


@dataclass(frozen=True)
class Warm:
    """A model on a GPU that is not there, after warm-up.

    Attributes:
        slots: of states.
        spans: whether tokens of an image see each other.
        vocab_size: width of the logits.
    """

    runner: ModelRunner
    gpu: StubGPU
    slots: int
    spans: bool
    vocab_size: int


@pytest.fixture(scope="module", params=MODELS)
def warm(request: Any, tmp_path_factory: Any) -> Iterator[Warm]:
    folder: Path = tmp_path_factory.mktemp("model")
    if request.param == "Llama":
        make_llama(folder, max_position_embeddings=LONGEST)
    else:
        from tests.parity.families import make_checkpoint

        case = CASES[request.param]
        folder = make_checkpoint(replace(case, values=longer(case.values)), folder, seed=3)
    config = read_config(folder)
    model = load_model(config, torch.float16, CPU, load_format="dummy")
    with stub_gpu() as gpu:
        choose_own_products(model)
        attention = create_attention(
            "triton",
            model.kv_specs,
            BLOCK,
            torch.float16,
            CPU,
            cache_dtype=MODELS[request.param],
            states=model.state_specs,
        )
        attention.allocate(NUM_BLOCKS)
        slots = 0
        if attention.states is not None:
            slots = NUM_SLOTS
            attention.states.allocate(slots)
        rows = InputBatch(ROWS, LONGEST, BLOCK, Uploader(CPU, packed=True))
        vocab_size = model_facts(config).vocab_size
        spans = any(spec.spans != "none" for spec in attention.specs)
        warm = Warm(ModelRunner(model, attention, rows, vocab_size), gpu, slots, spans, vocab_size)
        for step in variant_steps(LIMITS, NUM_BLOCKS, spans):
            run(warm, step)
        yield warm


def choose_own_products(model: CausalLM) -> None:
    """Choose them for all dense layers, after each was launched, as to be measured."""
    for layers in dense_layers(model, ALONE).values():
        weight = layers[0].weight
        assert weight is not None
        for each, early in OWN_PRODUCTS.items():
            gated_product(layers[0], early, weight.new_zeros(1 << each, 2 * weight.shape[1]))
        for layer in layers:
            layer.few_rows = FewRows(OWN_PRODUCTS)


def longer(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration of texts of the length that is served."""
    length = {"max_position_embeddings": LONGEST}
    if "text_config" in values:
        return {**values, "text_config": values["text_config"] | length}
    return {**values, **length}


def run(warm: Warm, step: Step, masked: bool = False) -> None:
    """Run a step to its end; ``masked``: with a grammar's mask for the first entry."""
    masks = None
    if masked:
        masks = [0], np.full((1, -(-warm.vocab_size // 32)), -1, np.int32)
    launched = warm.runner.launch(with_slots(step, warm.slots))
    warm.runner.sample(launched, masks).wait()


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
    min_p=st.sampled_from([0.0, 0.1]),
    typical_p=st.sampled_from([1.0, 1.0, 1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.1]),
    logit_bias=st.sampled_from([(), ((7, 3.0),)]),
    bad_words=st.sampled_from([(), ((5,), (6, 7))]),
    top_logprobs=st.sampled_from([0, 3]),
)


def step_of(
    chosen: list[tuple[int, int]],
    wanted: list[SamplingParams],
    scored: bool,
    seen: bool,
    drafts: list[int],
) -> Step:
    """A step of as much as the budget allows.

    Args:
        chosen: entries.
        wanted: how their rows sample, in turn.
        scored: whether prompts report log-probabilities.
        seen: whether prompts that begin are an image.
        drafts: how many the last decodes verify.
    """
    step, left = Step(0), BUDGET
    counts = [min(count, end) for end, count in chosen]
    order = sorted(range(len(chosen)), key=lambda index: counts[index] > 1)
    decodes = step.num_decodes = sum(count == 1 for count in counts)
    for row, index in enumerate(order):
        end, count = chosen[index][0], counts[index]
        if count > 1:
            count = min(count, left)
            left -= count
            if not count:
                break
        drafted = drafts[row - decodes] if decodes - len(drafts) <= row < decodes else 0
        end = min(end, LONGEST - 1 - drafted)
        blocks = [block % NUM_BLOCKS for block in range(-(-(end + drafted) // BLOCK))]
        extras, images = NO_EXTRAS, ()
        if scored and count > 1:
            extras = OptionalOutputs(prompt_logprobs=2)
        if seen and end == count > 1:
            images = (RowImage(((0, count),), bidirectional=True),)
        sampling = wanted[row % len(wanted)]
        new = NewRow(row, row, [0] * end, end, blocks, sampling, extras, images=images)
        step.new.append(new)
        add_row(step, row, end - count, count + drafted)
        if drafted:
            step.drafts.append(TokenAppend(row, end, [0] * drafted))
            step.samples[-1] += drafted
    return step


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    entries,
    st.lists(samplings, min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(1, 8), max_size=3),
)
def test_random_steps_ask_for_nothing_new(
    warm: Warm,
    chosen: list[tuple[int, int]],
    wanted: list[SamplingParams],
    scored: bool,
    seen: bool,
    masked: bool,
    drafts: list[int],
) -> None:
    """``drafts``: how many the last decodes verify, of a model without states."""
    known = len(warm.gpu.variants)
    assert known > 5
    drafts = [] if warm.slots else drafts
    run(warm, step_of(chosen, wanted, scored, seen and warm.spans, drafts), masked)
    assert warm.gpu.variants[known:] == []


def product_of(kind: str, tokens: int) -> None:
    triton_product(torch.empty(tokens, 2048).half(), empty_weight(kind, 1, 4096, 2048), None)


def dense_product_of(bias: bool, tokens: int) -> None:
    if tokens <= 1 << MAX_CLASS:
        x, weight = torch.empty(tokens, 520).half(), torch.empty(4096, 520).half()
        added = weight[:, 0].contiguous() if bias else None
        few_rows_product(x, weight, added, OWN_PRODUCTS.get(rows_class(tokens), False))


def experts_of(kind: str, experts: int, tokens: int) -> None:
    pairs = TOP_K * tokens
    rows = ExpertRows(
        torch.empty(experts, dtype=torch.int32),
        torch.empty(pairs, dtype=torch.int32),
        shared_by=TOP_K,
    )
    x = torch.empty(tokens, 512).half()
    if kind == "plain":
        triton_grouped_linear(x, torch.empty(experts, 256, 512).half(), None, rows)
    else:
        triton_product(x, empty_weight(kind, experts, 256, 512), None, rows)


def adapters_of(rank: int, tokens: int) -> None:
    slots, outputs = 3, 256
    y, x = torch.empty(tokens, outputs).half(), torch.empty(tokens, 512).half()
    a, b = torch.empty(3, slots * rank, 512).half(), torch.empty(slots * rank, outputs).half()
    owners = torch.empty(outputs, dtype=torch.int32)
    ends, pairs = sort_pairs(torch.empty(tokens, 1, dtype=torch.int32), slots)
    add_(y, x, a, b, owners, ends, pairs)


TOP_K = 4
PRODUCTS: dict[str, Callable[[int], None]] = {
    **{kind: partial(product_of, kind) for kind in KINDS},
    **{
        f"{experts} experts, {kind}": partial(experts_of, kind, experts)
        for kind in ("plain", "mxfp4", "int4")
        for experts in (2, 5, 7, 8, 60)
    },
    "dense": partial(dense_product_of, False),
    "dense, with a bias": partial(dense_product_of, True),
    **{f"adapters of rank {rank}": partial(adapters_of, rank) for rank in (8, 64)},
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_any_number_of_rows_ask_for_nothing_new(name: str) -> None:
    """Warm-up's numbers of tokens are powers of two, and the limit."""
    with stub_gpu() as gpu:
        for tokens in powers_of_two(BUDGET):
            PRODUCTS[name](tokens)
        known = len(gpu.variants)
        assert known
        for tokens in (3, 5, 7, 11, 15, 17, 24, 25, 31, 33, 47, 49, 63, 65, 97, 129, 200, 257, 599):
            PRODUCTS[name](tokens)
        assert gpu.variants[known:] == []
