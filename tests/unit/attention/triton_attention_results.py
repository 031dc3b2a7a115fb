"""Triton's attention against the reference. Not collected by itself: see test_triton.py.

On a machine with CUDA it may be run as it stands, and then tests what the compiler made.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from tests.tools.paged_run import make_metadata
from tests.tools.triton_interpreter import dot
from tests.unit.attention.workload import last_of
from tgi_cli.attention import (
    AttentionMetadata,
    KVSpec,
    create_attention,
    triton_latent,
    triton_launch,
    triton_work,
)
from tgi_cli.attention import triton_tiles as tiles
from tgi_cli.attention.fp8 import to_fp8
from tgi_cli.attention.triton_cache import how_to_read, write_cache
from tgi_cli.layers import triton_ops

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
BLOCKS = 48
SPLIT_TOKENS = 256
LENGTHS = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 100)]
"""Decodes around a block's end, and one that is split."""
MIXED = [*LENGTHS[2:], (3, 31), (5, 5), (66, 90)]
"""With chunks that are short enough to be split like decodes, and prompts."""


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a tile or two, and few programs, which therefore have several items each."""
    rule = partial(
        triton_work.Rule, chunk=64, max_chunks=4, many_chunk=64, split_tokens=SPLIT_TOKENS
    )
    monkeypatch.setattr(triton_launch, "Rule", rule)
    monkeypatch.setattr(triton_latent, "CHUNK", 64)
    monkeypatch.setattr(triton_latent, "MANY_CHUNK", 64)
    if INTERPRETED:
        make = tiles.Hardware
        monkeypatch.setattr(tiles, "Hardware", lambda: make(processors=2))
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


class Workload:
    """A cache full of random numbers, NaN where nothing stands, and a step over it."""

    def __init__(
        self,
        lens: list[tuple[int, int]],
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 64,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        window: int | None = None,
        block_size: int = 16,
        chunk: int | None = None,
        value_dim: int | None = None,
        values_in_keys: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(len(lens) + dim)
        self.dtype, self.cache_dtype, self.block_size = dtype, cache_dtype, block_size
        self.spec = KVSpec(kv_heads, dim, window, value_dim, chunk, values_in_keys)
        self.until: list[int] = []
        self.blocks = BLOCKS * 16 // block_size
        free = random.Random(1).sample(range(self.blocks), self.blocks)
        self.tables = [[free.pop() for _ in range(-(-kv // block_size))] for _, kv in lens]
        self.lens = lens
        tokens = sum(query for query, _ in lens)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        # As projections leave them: side by side in one tensor.
        qkv = draw(tokens, heads + 2 * kv_heads, dim).to(DEVICE)
        self.query, self.key, self.value = qkv.split([heads, kv_heads, kv_heads], 1)
        if value_dim is not None:
            self.value = draw(tokens, kv_heads, value_dim).to(DEVICE)
        written = torch.zeros(self.blocks * block_size, dtype=torch.bool)
        for (_, kv_len), table in zip(lens, self.tables, strict=True):
            for position in range(kv_len):
                written[table[position // block_size] * block_size + position % block_size] = True
        self.caches = []
        for width in (dim, self.spec.value_width):
            numbers = draw(len(written), kv_heads, width)
            cache = torch.where(written[:, None, None], numbers, float("nan"))
            cache = cache if cache_dtype is None else to_fp8(cache, cache_dtype).view(cache_dtype)
            self.caches.append(cache.view(-1, block_size, kv_heads, width).to(DEVICE))

    def metadata(self) -> AttentionMetadata:
        """Blocks that are not seen are not there."""
        tables = [list(table) for table in self.tables]
        for (query, kv), table in zip(self.lens, tables, strict=True):
            behind = self.spec.first_visible(kv - query) // self.block_size
            behind = 0 if self.spec.spans == "whole" else behind
            table[:behind] = [2**31 - 1] * behind
        queries, kvs = (list(lens) for lens in zip(*self.lens, strict=True))
        step = make_metadata(tables, queries, kvs, self.block_size)
        for name in ("query_start_loc", "kv_lens", "block_table", "slot_mapping"):
            setattr(step, name, getattr(step, name).to(DEVICE))
        if self.until:
            step.visible_until = torch.tensor(self.until, dtype=torch.int32).to(DEVICE)
        return step

    def backend(self, kind: str) -> Any:
        attention = create_attention(
            kind, [self.spec], self.block_size, self.dtype, DEVICE, self.cache_dtype
        )
        attention.num_blocks = self.blocks
        attention.key_cache = [self.caches[0].clone()]
        attention.value_cache = [self.caches[1].clone()]
        if self.spec.values_in_keys:
            attention.value_cache = [attention.key_cache[0][..., : self.spec.value_width]]
        return attention

    def run(self, attention: Any, **scoring: Any) -> Tensor:
        return attention(
            0,
            self.query,
            self.key,
            None if self.spec.values_in_keys else self.value,
            self.query.shape[-1] ** -0.5,
            **scoring,
        )

    def check(self, **scoring: Any) -> None:
        """What comes out, and what was written."""
        reference, ours = self.backend("torch"), self.backend("triton")
        metadata = self.metadata()
        reference.plan(metadata)
        ours.plan(metadata)
        close(self.run(ours, **scoring), self.run(reference, **scoring))
        for mine, wanted in zip(
            ours.stored,
            reference.stored,
            strict=True,
        ):
            assert torch.equal(ours.raw(mine).view(torch.uint8), ours.raw(wanted).view(torch.uint8))


def close(ours: Tensor, wanted: Tensor) -> None:
    """The interpreter rounds to bfloat16 downwards; a GPU adds products of parts of float32."""
    exact = 1e-5 if INTERPRETED else 1e-4
    allowed = {torch.float32: exact, torch.float16: 4e-3, torch.bfloat16: 2e-2}[wanted.dtype]
    assert ours.dtype == wanted.dtype
    torch.testing.assert_close(ours, wanted, atol=allowed, rtol=allowed)


SCORINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -2.0, 3.0, 6.0]).to(DEVICE)},
    "both": {"softcap": 3.0, "sinks": torch.tensor([0.5, -2.0, 3.0, 6.0]).to(DEVICE)},
}


@pytest.mark.parametrize(
    ("window", "scoring"),
    [
        (None, "plain"),
        (None, "both"),
        (1, "plain"),
        (16, "sinks"),
        (45, "cap"),
    ],
)
def test_mixed_steps(window: int | None, scoring: str) -> None:
    Workload(MIXED, window=window).check(**SCORINGS[scoring])


WIDER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "narrow values": ({"value_dim": 24}, {}),
    "wide values in windows": ({"value_dim": 80, "window": 20}, {}),
    "values in keys": ({"value_dim": 32, "values_in_keys": True, "kv_heads": 1}, {}),
    "narrow values of 8 bits": ({"value_dim": 32, "cache_dtype": FP8[0]}, {}),
    "short chunks": ({"chunk": 7}, {}),
    "chunks": ({"chunk": 40}, {}),
    "slopes": ({}, {"bias": torch.tensor([[0.0, -(2.0**-n)] for n in range(4)]).to(DEVICE)}),
    "learned bias": (
        {"window": 60},
        {
            "bias": torch.randn(4, 37, generator=torch.Generator().manual_seed(2)).to(DEVICE),
            "sinks": torch.tensor([0.5, -2.0, 3.0, 6.0]).to(DEVICE),
        },
    ),
    "bias under a cap": (
        {},
        {"bias": torch.tensor([[0.3, 0.1]] * 4).to(DEVICE), "softcap": 2.0},
    ),
}


@pytest.mark.parametrize("name", WIDER)
def test_widths_chunks_and_biases(name: str) -> None:
    options, scoring = WIDER[name]
    Workload(MIXED, **options).check(**scoring)


SPANS = {
    "window": [[], [], [], [(29, 2)], [(1, 3)], [(30, 50)]],
    "whole": [[], [], [], [(0, 31)], [(0, 4)], [(0, 85)]],
}
"""Of the sequences of MIXED: of few tokens and of many, within a tile and over several."""


@pytest.mark.parametrize("kind", SPANS)
@pytest.mark.parametrize(("window", "scoring"), [(None, "plain"), (10, "sinks"), (45, "cap")])
def test_tokens_of_a_span_see_each_other(kind: Any, window: int | None, scoring: str) -> None:
    load = Workload(MIXED, window=window)
    load.spec = replace(load.spec, spans=kind)
    load.until = [
        last_of(position, spans)
        for (query, kv), spans in zip(MIXED, SPANS[kind], strict=True)
        for position in range(kv - query, kv)
    ]
    load.check(**SCORINGS[scoring])
    load.until = []  # the next step may have none
    load.check()


def test_layers_without_spans_do_not_look_at_them() -> None:
    load = Workload(MIXED, window=45)
    load.until = [10**6] * len(load.query)
    load.check()


@pytest.mark.parametrize(
    ("heads", "dtype", "cache_dtype", "sinks"),
    [
        (20, torch.float32, None, False),
        (3, torch.bfloat16, None, True),
        (16, torch.float16, FP8[0], False),
        (70, torch.bfloat16, FP8[1], False),
    ],
)
def test_rows_of_latents(
    heads: int, dtype: torch.dtype, cache_dtype: torch.dtype | None, sinks: bool
) -> None:
    lens = [(1, 1), (1, 33), (1, 100), (3, 31), (21, 37)]
    load = Workload(lens, heads, 1, 40, dtype, cache_dtype, value_dim=24, values_in_keys=True)
    load.check(**({"sinks": torch.randn(heads).to(DEVICE)} if sinks else {}))
    Workload(lens[:3], heads, 1, 40, dtype, value_dim=24, values_in_keys=True).check()
    # More dimensions than those of float32 that are multiplied at once.
    Workload(lens[2:4], heads, 1, 88, dtype, cache_dtype, value_dim=72, values_in_keys=True).check()


def test_a_cache_that_another_layer_has_written() -> None:
    load = Workload(MIXED, window=45)
    ours, reference = load.backend("triton"), load.backend("torch")
    for attention in (ours, reference):
        attention.plan(load.metadata())
        load.run(attention)
    before = ours.key_cache[0].clone()
    outputs = [each(0, load.query * 0.5, None, None, 0.2) for each in (ours, reference)]
    close(*outputs)
    torch.testing.assert_close(ours.key_cache[0], before, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("lens", [LENGTHS, [(20, 20)], [(66, 66), (1, 60)]])
def test_steps_of_one_sort(lens: list[tuple[int, int]]) -> None:
    Workload(lens).check()


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (6, 2), (8, 2), (8, 1), (71, 1)])
def test_ratios_of_heads(heads: int, kv_heads: int) -> None:
    lens = [(1, 33), (4, 50), (34, 75)] if heads < 71 else [(1, 33), (2, 20), (3, 3)]
    Workload(lens, heads, kv_heads, 32).check()


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [
        (24, torch.float32),
        (80, torch.bfloat16),
        (96, torch.float16),
        (128, torch.bfloat16),
        (256, torch.bfloat16),
    ],
)
def test_dimensions_of_heads(dim: int, dtype: torch.dtype) -> None:
    Workload([(1, 5), (1, 70), (19, 33)], dim=dim, dtype=dtype).check()
    Workload([(66, 80)], heads=2, kv_heads=1, dim=dim, dtype=dtype, window=40).check()


@pytest.mark.parametrize("block_size", [1, 8, 24, 64])
def test_sizes_of_blocks(block_size: int) -> None:
    Workload([(1, 5), (1, 70), (70, 90)], block_size=block_size, dim=16, window=37).check()


@pytest.mark.parametrize(
    ("cache_dtype", "dtype", "window"),
    [
        (torch.float8_e4m3fn, torch.float32, None),
        (torch.float8_e4m3fn, torch.bfloat16, 45),
        (torch.float8_e5m2, torch.float16, None),
        (torch.float8_e5m2, torch.bfloat16, 45),
    ],
)
def test_8_bit_caches(cache_dtype: torch.dtype, dtype: torch.dtype, window: int | None) -> None:
    lens = [(1, 17), (1, 90), (2, 40), (66, 80)]
    Workload(lens, dtype=dtype, cache_dtype=cache_dtype, window=window).check()


@pytest.mark.parametrize("cache_dtype", FP8)
@pytest.mark.parametrize("casts", [True, False])
def test_every_8_bit_number_is_read_as_torch_reads_it(
    cache_dtype: torch.dtype, casts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key gets all of the weight, so that what comes out is its value."""
    if not INTERPRETED and casts != (torch.cuda.get_device_capability() >= (8, 9)):
        return  # the other way is the other GPUs'
    load = Workload([(1, 1)], heads=1, kv_heads=1, dim=256, dtype=torch.float32)
    load.cache_dtype = cache_dtype
    codes = torch.arange(256).to(torch.uint8).view(cache_dtype).to(DEVICE)
    load.caches = [torch.zeros(48, 16, 1, 256, device=DEVICE).to(cache_dtype) for _ in range(2)]
    attention = load.backend("triton")
    monkeypatch.setattr(type(attention.hardware), "casts_fp8", casts)
    attention.plan(load.metadata())
    attention.raw(attention.value_cache[0])[load.tables[0][0], 0, 0] = codes.view(torch.uint8)
    output = attention.attend(0, load.query, 1.0).flatten()
    wanted = codes.float()
    if INTERPRETED and casts:  # to which it is an 8-bit number like the others
        output, wanted = output[wanted.isfinite()], wanted[wanted.isfinite()]
    torch.testing.assert_close(output, wanted, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("cache_dtype", FP8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_8_bit_numbers_are_rounded_as_the_reference_does(
    cache_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes = torch.arange(256).to(torch.uint8).view(cache_dtype).float()
    between = (codes[1:] + codes[:-1]) / 2  # ties
    near = torch.cat((between * (1 - 2**-9), between, between * (1 + 2**-9), torch.zeros(3)))
    numbers = torch.cat((every, near)).to(dtype).view(4, -1, 8).to(DEVICE)
    caches = torch.zeros(2, 4, 1, *numbers.shape[1:], dtype=torch.uint8, device=DEVICE)
    slots = torch.arange(4, device=DEVICE)
    write_cache(numbers, -numbers, *caches, slots, how_to_read(cache_dtype, casts=False))
    assert torch.equal(caches[0, :, 0], to_fp8(numbers, cache_dtype))
    assert torch.equal(caches[1, :, 0], to_fp8(-numbers, cache_dtype))


def test_a_broken_number_breaks_its_own_sequence_alone() -> None:
    lens = [(1, 60), (1, 60), (66, 66), (66, 66)]
    load = Workload(lens)
    load.value[[1, 70]] = float("nan")
    attention = load.backend("triton")
    attention.plan(load.metadata())
    output = load.run(attention)
    assert output[1].isnan().all()
    assert output[[0, *range(2, 68)]].isfinite().all()
    assert output[70:134].isnan().all()


def test_layouts_of_heads_are_any() -> None:
    load = Workload([(1, 20), (30, 30)])
    attention = load.backend("triton")
    attention.plan(load.metadata())
    wanted = load.run(attention)
    for name in ("query", "key", "value"):
        tensor = getattr(load, name)
        setattr(load, name, tensor.transpose(0, 1).contiguous().transpose(0, 1))
    close(load.run(attention), wanted)
    for name in ("query", "key", "value"):
        setattr(load, name, getattr(load, name).transpose(1, 2).contiguous().transpose(1, 2))
    close(load.run(attention), wanted)


class Launches:
    """What a step hands to kernels: the same each time, or a graph of it would be wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from tgi_cli.attention import triton_cache, triton_reduce

        self.seen: list[Any] = []
        for module, name in (
            (triton_work, "work_kernel"),
            (triton_launch, "decode_kernel"),
            (triton_reduce, "reduce_kernel"),
            (triton_cache, "_write_kernel"),
        ):
            monkeypatch.setattr(module, name, self.recorder(name, getattr(module, name)))

    def recorder(self, name: str, kernel: Any) -> Any:
        seen = self.seen

        class Recorder:
            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                def launch(*args: Any, **kwargs: Any) -> None:
                    fixed = [
                        (value.shape, value.stride(), value.dtype)
                        if isinstance(value, Tensor)
                        else value
                        for value in (*args, *kwargs.values())
                    ]
                    static = {
                        key: kwargs[key].data_ptr()
                        for key in ("kv_lens", "block_table")
                        if key in kwargs
                    }
                    seen.append((name, grid, fixed, static))
                    kernel[grid](*args, **kwargs)

                return launch

        return Recorder()


@pytest.mark.parametrize(
    ("window", "cache_dtype", "processors"),
    [(None, None, 4), (None, torch.float8_e4m3fn, 16), (45, None, 16)],
)
def test_padded_decodes(
    window: int | None,
    cache_dtype: torch.dtype | None,
    processors: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a graph may hold: launches do not change with the step, padding does no harm."""
    rows, heads = 5, 4
    launches = Launches(monkeypatch)
    before: list[Any] = []
    sinks = SCORINGS["sinks"]["sinks"]
    for lens in (LENGTHS, LENGTHS[2:], [(1, 150), (1, 3)]):
        load = Workload(lens, heads, window=window, cache_dtype=cache_dtype)
        attention = load.backend("triton")
        attention.hardware = replace(attention.hardware, processors=processors)
        buffers = attention.decode_buffers(rows + 2, 20)
        assert buffers.slot_mapping.tolist() == [-1] * (rows + 2)
        wanted = load.backend("torch")
        metadata = load.metadata()
        wanted.plan(metadata)
        expected = load.run(wanted, sinks=sinks)

        def step(number: int, load: Workload = load, attention: Any = attention) -> Tensor:
            padding = load.query.new_full((rows - number, heads, 64), float("nan"))
            query = torch.cat((load.query[:number], padding))
            key = torch.cat((load.key[:number], padding[:, :2]))
            value = torch.cat((load.value[:number], padding[:, :2]))
            output: Tensor = attention(0, query, key, value, 64**-0.5, sinks=sinks)
            return output

        attention.plan_padded(None, rows)
        untouched = attention.raw(attention.key_cache[0]).clone()
        assert not step(0).any()
        assert torch.equal(
            attention.raw(attention.key_cache[0]).view(torch.uint8), untouched.view(torch.uint8)
        )
        launches.seen.clear()
        attention.plan_padded(metadata, rows)
        output = step(len(lens))
        close(output[: len(lens)], expected)
        assert not output[len(lens) :].any()
        assert torch.equal(
            attention.raw(attention.value_cache[0]).view(torch.uint8),
            wanted.raw(wanted.value_cache[0]).view(torch.uint8),
        )
        names = [name for name, *_ in launches.seen]
        assert names == ["_write_kernel", "work_kernel", "decode_kernel", "reduce_kernel"]
        static = launches.seen[2][3]
        assert static["kv_lens"] == buffers.kv_lens.data_ptr()
        assert static["block_table"] == buffers.block_table.data_ptr()
        now = [(name, grid, fixed) for name, grid, fixed, _ in launches.seen]
        assert not before or now == before
        before = now


def test_steps_that_cannot_be_padded_are_refused() -> None:
    load = Workload([(1, 20), (1, 30), (3, 3)])
    attention = load.backend("triton")
    with pytest.raises(ValueError, match="decode_buffers first"):
        attention.plan_padded(None, 1)
    attention.decode_buffers(4, 4)
    with pytest.raises(ValueError, match="2 of 3 sequences are decodes"):
        attention.plan_padded(load.metadata(), 4)
    load.lens, load.tables = load.lens[:2], load.tables[:2]
    for rows in (1, 5):
        with pytest.raises(ValueError, match="2 rows of 3 blocks"):
            attention.plan_padded(load.metadata(), rows)
    attention.decode_buffers(4, 2)
    with pytest.raises(ValueError, match="of 4 x 2"):
        attention.plan_padded(load.metadata(), 4)


def test_attention_over_what_the_caller_wrote() -> None:
    load = Workload([(1, 17), (2, 40), (70, 90)])
    whole, parts = load.backend("triton"), load.backend("triton")
    metadata = load.metadata()
    whole.plan(metadata)
    parts.plan(metadata)
    assert torch.equal(parts.step_slots, metadata.slot_mapping)
    parts.write(0, load.key, load.value, parts.step_slots)
    assert torch.equal(parts.attend(0, load.query, 0.125), load.run(whole))


@pytest.mark.parametrize(
    ("dims", "rotated", "norm", "cache_dtype"),
    [
        (24, 24, False, None),
        (80, 32, True, None),
        (16, 16, True, torch.float8_e4m3fn),
        (20, 8, False, torch.float8_e5m2),
    ],
)
def test_rotation_that_writes(
    dims: int, rotated: int, norm: bool, cache_dtype: torch.dtype | None
) -> None:
    """As rotation in place, and then a write of keys and values."""
    torch.manual_seed(0)
    heads, kv_heads, slots = 5, 2, torch.tensor([7, -1, 30, 0, 12], device=DEVICE)
    qkv = torch.randn(5, heads + 2 * kv_heads, dims + 4)[..., :dims].to(DEVICE)
    weight = torch.randn(heads + kv_heads, dims).to(DEVICE) if norm else None
    cosines, sines = torch.rand(2, 5, 1, rotated).to(DEVICE)
    caches = torch.zeros(2, 2, 16, kv_heads, dims).to(DEVICE, cache_dtype or torch.float32)
    before = qkv.clone()
    wanted = qkv.clone()
    turned = wanted[:, : heads + kv_heads]
    if weight is None:
        triton_ops.rotate_(turned, cosines, sines)
    else:
        triton_ops.norm_rotate_(turned, weight, 1e-5, cosines, sines)
    expected = torch.zeros_like(caches)
    how = how_to_read(caches.dtype, casts=False)
    _, key, value = wanted.split([heads, kv_heads, kv_heads], 1)
    write_cache(key, value, *raw(expected), slots, how)
    triton_ops.norm_rotate_write(qkv, weight, 1e-5, cosines, sines, *caches, slots)
    torch.testing.assert_close(qkv[:, :heads], wanted[:, :heads])
    assert torch.equal(qkv[:, heads:], before[:, heads:])
    assert torch.equal(raw(caches), raw(expected))
    assert raw(caches)[0, 0, 7].any()


def raw(caches: Tensor) -> Tensor:
    return caches.view(torch.uint8) if caches.dtype in FP8 else caches
