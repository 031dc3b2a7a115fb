"""Caps and sinks: both backends against attention written out, transformers' and each other."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.tools.paged_run import CPU, kernels_add_up_rows_alike, make_metadata
from tests.unit.attention.workload import BATCHES, BLOCK, DIM, FP8, Batch, make
from tgi_cli.attention import KVSpec, PagedAttention, cpu_scores, create_attention

SINKS = torch.tensor([0.5, -2.0, 3.0, 1.0, 0.0, 6.0])
SCORINGS: dict[str, dict[str, Any]] = {
    "cap": {"softcap": 2.0},
    "sinks": {"sinks": SINKS},
    "both": {"softcap": 2.0, "sinks": SINKS},
}
scorings = pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
ways = pytest.mark.parametrize(
    "scoring", [SCORINGS["sinks"], SCORINGS["both"]], ids=["fused", "in steps"]
)
backends = pytest.mark.parametrize("backend", ["torch", "cpu"])


def broken(attention: PagedAttention) -> PagedAttention:
    """A cache full of what neighbours left whose numbers overflowed: it must not be seen."""
    for cache in (*attention.key_cache, *attention.value_cache):
        cache.fill_(float("nan"))
    return attention


def through(cache_dtype: torch.dtype | None) -> Callable[[Tensor], Tensor]:
    """What a cache makes of keys and values."""
    return lambda numbers: numbers if cache_dtype is None else numbers.to(cache_dtype).to(numbers)


@backends
@scorings
@pytest.mark.parametrize("name", BATCHES)
def test_equals_attention_written_out(backend: str, scoring: dict[str, Any], name: str) -> None:
    attention = broken(make(backend, [KVSpec(2, DIM)] * 2))
    Batch(BATCHES[name], 6, 2, torch.float32, **scoring).check(attention, 1, 1e-5)


@backends
@ways
@pytest.mark.parametrize("window", [1, 50, 128, 260])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
def test_windows_hide_what_is_behind_them(
    backend: str, scoring: dict[str, Any], window: int, cache_dtype: torch.dtype | None
) -> None:
    lens = [(1, 300), (1, 20), (1, 900), (33, 60), (100, 400)]
    attention = broken(make(backend, [KVSpec(2, DIM, window)], cache_dtype=cache_dtype))
    batch = Batch(lens, 6, 2, torch.float32, **scoring)
    batch.check(attention, 0, 1e-5, through(cache_dtype))


@backends
@ways
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float16, torch.float8_e5m2),
    ],
)
def test_16_bits_lose_no_more_than_their_rounding(
    backend: str, scoring: dict[str, Any], dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> None:
    attention = make(backend, [KVSpec(2, DIM, 50)], dtype, cache_dtype)
    batch = Batch(BATCHES["everything"], 6, 2, dtype, **scoring)
    batch.check(attention, 0, 0.02, through(cache_dtype))


@backends
@pytest.mark.parametrize("scoring", [{}, *SCORINGS.values()], ids=["neither", *SCORINGS])
@pytest.mark.parametrize("dim", [80, 100, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_dims_and_scales_are_any(
    backend: str, scoring: dict[str, Any], dim: int, dtype: torch.dtype
) -> None:
    lens = [(1, 70), (1, 5), (20, 90), (30, 30)]
    attention = make(backend, [KVSpec(2, dim)], dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    Batch(lens, 6, 2, dtype, dim=dim, scale=0.07, **scoring).check(attention, 0, tolerance)


@backends
@pytest.mark.parametrize(
    "scoring", [{}, {"softcap": 2.0}, {"sinks": torch.ones(1)}], ids=["neither", "cap", "sinks"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shard_may_have_one_head(
    backend: str, scoring: dict[str, Any], dtype: torch.dtype
) -> None:
    attention = make(backend, [KVSpec(1, DIM, 40)], dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    Batch(BATCHES["everything"], 1, 1, dtype, **scoring).check(attention, 0, tolerance)


@backends
@pytest.mark.parametrize("softcap", [0.5, 30.0, 50.0, 400.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 20.0])
def test_caps_hold_for_small_and_large_scores(backend: str, softcap: float, scale: float) -> None:
    # Scores of scale 20 are hundreds: without its cap this softmax would take one key alone.
    lens = [(1, 100), (40, 120)]
    attention = make(backend, [KVSpec(2, DIM)])
    batch = Batch(lens, 6, 2, torch.float32, scale=scale, softcap=softcap, sinks=SINKS)
    batch.check(attention, 0, 5e-4 if softcap > 100 or scale > 10 else 3e-5)


@backends
def test_sinks_take_everything_or_nothing(backend: str) -> None:
    attention = make(backend, [KVSpec(2, DIM)])
    lens = [(1, 100), (40, 120)]
    all_of_it = Batch(lens, 6, 2, torch.float32, sinks=torch.full((6,), 1e4))
    assert all(output.abs().max() == 0 for output in all_of_it.attend(attention, 0))
    for sink in (-1e4, -torch.inf):
        nothing = Batch(lens, 6, 2, torch.float32, sinks=torch.full((6,), sink))
        without = Batch(lens, 6, 2, torch.float32)
        for one, other in zip(
            nothing.attend(attention, 0), without.attend(attention, 0), strict=True
        ):
            assert torch.equal(one, other)


@backends
@scorings
def test_a_broken_number_breaks_its_own_sequence_alone(
    backend: str, scoring: dict[str, Any]
) -> None:
    attention = make(backend, [KVSpec(2, DIM)])
    numbers, spoilt = torch.ones(2, 2, DIM), torch.ones(2, 2, DIM)
    spoilt[0] = torch.nan
    attention.plan(make_metadata([[5], [6]], [1, 1], [1, 1], BLOCK))
    output = attention(0, torch.ones(2, 6, DIM), spoilt, numbers, 1.0, **scoring)
    assert output[0].isnan().all()
    assert output[1].isfinite().all()


@scorings
def test_sinks_without_torch_s_private_kernel(
    scoring: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_scores, "fused_with_sums", None)
    attention = broken(make("cpu", [KVSpec(2, DIM, 50)]))
    Batch(BATCHES["everything"], 6, 2, torch.float32, **scoring).check(attention, 0, 1e-5)


def test_torch_has_the_kernel_that_returns_log_sums() -> None:
    assert cpu_scores.fused_with_sums is not None


@backends
@pytest.mark.parametrize("window", [None, 30])
def test_equals_transformers_gemma_2_and_gpt_oss(backend: str, window: int | None) -> None:
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as capped
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as sunk

    batch = Batch([(75, 75)], 6, 2, torch.float32)
    query, key, value = (
        some[0].transpose(0, 1)[None] for some in (batch.queries, batch.keys, batch.values)
    )
    distance = torch.arange(75)[:, None] - torch.arange(75)
    hidden = (distance < 0) | (distance >= (window or 75))
    mask = torch.zeros(75, 75).masked_fill_(hidden, -torch.inf)[None, None]
    module: Any = SimpleNamespace(num_key_value_groups=3, sinks=SINKS, training=False)
    attention = make(backend, [KVSpec(2, DIM, window)])

    wanted, _ = capped(module, query, key, value, mask, scaling=0.3, softcap=2.0)
    batch.softcap = 2.0
    torch.testing.assert_close(batch.attend(attention, 0)[0], wanted[0], atol=1e-5, rtol=0)
    wanted, _ = sunk(module, query, key, value, mask, scaling=0.3)
    batch.softcap, batch.sinks = None, SINKS
    torch.testing.assert_close(batch.attend(attention, 0)[0], wanted[0], atol=1e-5, rtol=0)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[int | None, torch.dtype | None, Batch]:
    """Window, cache and batch."""
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3, 4, 5]))
    kv_len = st.one_of(st.integers(1, 90), st.integers(1, 700))
    decodes = draw(st.lists(kv_len, max_size=5))
    prefills = draw(st.lists(st.tuples(st.integers(1, 150), kv_len), max_size=2))
    lens = [(1, length) for length in decodes] + [(min(q, k), k) for q, k in prefills]
    batch = Batch(
        lens or [(1, 1)],
        heads,
        kv_heads,
        torch.float32,
        dim=draw(st.sampled_from([8, 24, 64, 80])),
        scale=draw(st.sampled_from([0.02, 0.125, 0.5])),
        softcap=draw(st.sampled_from([None, 1.0, 30.0, 50.0])),
        sinks=draw(st.sampled_from([None, torch.linspace(-3, 5, heads).bfloat16()])),
    )
    window = draw(st.sampled_from([None, 1, 2, 17, 64, 96, 128, 300]))
    return window, draw(st.sampled_from([None, *FP8])), batch


@settings(max_examples=40, deadline=None, derandomize=True)
@given(workloads())
def test_the_fast_backend_follows_the_oracle(
    workload: tuple[int | None, torch.dtype | None, Batch],
) -> None:
    window, cache_dtype, batch = workload
    spec = KVSpec(batch.keys[0].shape[1], batch.dim, window)
    outputs = [
        batch.attend(broken(make(backend, [spec], cache_dtype=cache_dtype)), 0)
        for backend in ("torch", "cpu")
    ]
    for wanted, output in zip(*outputs, strict=True):
        torch.testing.assert_close(output, wanted, atol=1e-5, rtol=0)


class Lonely:
    """One sequence, computed in one way or another."""

    length = 620

    def __init__(self, spec: KVSpec, dtype: torch.dtype, scoring: dict[str, Any]) -> None:
        self.spec, self.dtype, self.scoring = spec, dtype, scoring
        generator = torch.Generator().manual_seed(0)
        self.query, self.key, self.value = (
            torch.randn(self.length, heads, dim, generator=generator).to(dtype)
            for heads, dim in ((6, spec.head_dim), (2, spec.head_dim), (2, spec.value_width))
        )

    def attend(self, chunks: list[int], beside: list[int]) -> Tensor:
        """In ``chunks``, each together with decodes of sequences ``beside`` so long."""
        attention = create_attention("cpu", [self.spec], BLOCK, self.dtype, CPU)
        attention.allocate(400)
        for cache in (*attention.key_cache, *attention.value_cache):
            cache.copy_(torch.randn(cache.shape))
        tables = [list(range(44 * index, 44 * index + 44)) for index in range(len(beside))]
        tables.append(list(range(399, 359, -1)))
        done, outputs = 0, []
        for chunk in chunks:
            query_lens, kv_lens = [1] * len(beside) + [chunk], [*beside, done + chunk]
            attention.plan(make_metadata(tables, query_lens, kv_lens, BLOCK))
            query, key, value = (
                torch.cat((some[: len(beside)] * 2, some[done : done + chunk]))
                for some in (self.query, self.key, self.value)
            )
            output = attention(0, query, key, value, 0.125, **self.scoring)
            outputs.append(output[len(beside) :])
            done += chunk
        assert done == self.length
        return torch.cat(outputs)


def rows_add_up_alike(fused: bool, dtype: torch.dtype) -> bool:
    """Whether this processor's kernels have the property that the code above them keeps."""
    return kernels_add_up_rows_alike(dtype if fused else torch.float32)


@pytest.mark.parametrize("scoring", [{}, *SCORINGS.values()], ids=["neither", *SCORINGS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 40, 128])
def test_a_token_does_not_depend_on_the_other_sequences_of_its_step(
    scoring: dict[str, Any], dtype: torch.dtype, window: int | None
) -> None:
    lonely = Lonely(KVSpec(2, 80, window), dtype, scoring)
    whole = lonely.attend([620], [])
    for other in (
        lonely.attend([100, 300, 7, 1, 192, 20], []),
        lonely.attend([33, 500, 64, 1, 1, 1, 20], [5, 300, 699]),
        lonely.attend([1, 2, 3, 190, 200, 204, *[1] * 20], [640] * 8),
    ):
        if rows_add_up_alike("softcap" not in scoring, dtype):
            assert torch.equal(other, whole)
        else:
            tolerance = 1e-5 if dtype is torch.float32 else 0.02
            torch.testing.assert_close(other, whole, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("spec", "biased"),
    [
        (KVSpec(2, 80, value_dim=48), False),
        (KVSpec(2, 48, value_dim=80), True),
        (KVSpec(2, 80, chunk=20), False),
        (KVSpec(2, 80, chunk=200), False),
        (KVSpec(2, 80, chunk=200), True),
    ],
)
def test_a_token_depends_on_itself_alone_in_chunks_and_with_biases(
    spec: KVSpec, biased: bool
) -> None:
    bias = torch.randn(6, 19, generator=torch.Generator().manual_seed(1))
    lonely = Lonely(spec, torch.float32, {"bias": bias} if biased else {})
    whole = lonely.attend([620], [])
    for other in (
        lonely.attend([100, 300, 7, 1, 192, 20], []),
        lonely.attend([1, 2, 3, 190, 200, 204, *[1] * 20], [640] * 8),
    ):
        if rows_add_up_alike(not biased, torch.float32):
            assert torch.equal(other, whole)
        else:
            torch.testing.assert_close(other, whole, atol=1e-5, rtol=0)


def test_the_number_of_threads_changes_no_bit_of_what_a_cap_makes() -> None:
    # Three: they share out no tensor evenly, and torch treats the ends of shares in another way.
    lonely = Lonely(KVSpec(2, 80), torch.float32, SCORINGS["both"])
    before = torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            outputs.append(lonely.attend([620], []))
    finally:
        torch.set_num_threads(before)
    if rows_add_up_alike(False, torch.float32):
        assert torch.equal(*outputs)
    else:
        torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)
