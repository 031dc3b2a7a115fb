"""Lists of work, and what they are for: results that do not depend on the rest of the step.

Not collected by itself: see test_triton.py. On a machine with CUDA it may be run as it stands.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from tests.tools.paged_run import make_metadata
from tests.unit.attention.triton_attention_results import (
    DEVICE,
    INTERPRETED,
    Launches,
    Workload,
    close,
    dot,
)
from tgi_cli.attention import AttentionMetadata, KVScales, triton_launch
from tgi_cli.attention import triton_tiles as tiles
from tgi_cli.attention.triton_work import Rule, limits_of, make_work, sizes_of

SMALL = Rule(
    group=2,
    few_rows=16,
    many_rows=64,
    few_tokens=8,
    chunk=64,
    max_chunks=4,
    many_chunk=64,
    split_tokens=64,
)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = partial(Rule, chunk=64, max_chunks=4, many_chunk=64, split_tokens=256)
    monkeypatch.setattr(triton_launch, "Rule", rule)
    if INTERPRETED:
        make = tiles.Hardware
        monkeypatch.setattr(tiles, "Hardware", lambda: make(processors=2))
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def random_lens(seed: int) -> list[tuple[int, int]]:
    """Some steps are of decodes alone; some sequences are padding."""
    choose = random.Random(seed)
    lens = []
    for _ in range(choose.randint(1, 12)):
        query = choose.choice([1, 1, 1, 0, 3, 8, 9, 30, 70] if seed % 3 else [1])
        kv = query + choose.choice([0, 5, 63, 64, 65, 200, 256, 257, 900])
        lens.append((query, kv if choose.random() < 0.8 else 0))
    return lens


def metadata_of(lens: list[tuple[int, int]]) -> AttentionMetadata:
    """Without blocks."""
    starts = np.cumsum([0, *(query for query, _ in lens)])
    return AttentionMetadata(
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        torch.tensor([kv for _, kv in lens], dtype=torch.int32, device=DEVICE),
        torch.zeros(len(lens), 1, dtype=torch.int32, device=DEVICE),
        torch.zeros(int(starts[-1]), dtype=torch.int64, device=DEVICE),
        [query for query, _ in lens],
        [kv for _, kv in lens],
        0,
    )


def arrays(lens: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    queries, kvs = zip(*lens, strict=True)
    return np.array(queries, np.int64), np.array(kvs, np.int64)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("seed", range(8))
def test_lists_have_each_item_once_and_parts_apart(seed: int, window: int) -> None:
    rule = replace(SMALL, window=window)
    lens = random_lens(seed)
    sizes = sizes_of(rule, *arrays(lens))
    work = make_work(metadata_of(lens), rule, sizes)
    assert work.counts.tolist() == [size.items for size in sizes]
    all_tiles, all_chunks = rule.bounds(*arrays(lens))
    begins = {False: 0, True: sizes[0].items}
    found = work.items.tolist()
    seen = []
    taken: dict[bool, set[int]] = {False: set(), True: set()}
    for many, size in zip((False, True), sizes, strict=True):
        own = found[begins[many] : begins[many] + size.items]
        for sequence in dict.fromkeys(own):
            assert (lens[sequence][0] > rule.few_tokens) == many
            start = int(work.starts[sequence])
            count = int(all_tiles[sequence] * all_chunks[sequence])
            assert (
                own[start : start + count] == [sequence] * count == [sequence] * own.count(sequence)
            )
            if all_chunks[sequence] > 1:
                at = int(work.parts_at[sequence])
                own_parts = range(at, at + lens[sequence][0] * int(all_chunks[sequence]))
                assert taken[many].isdisjoint(own_parts)
                taken[many].update(own_parts)
            seen.append(sequence)
    for many, size in zip((False, True), sizes, strict=True):
        assert taken[many] == set(range(size.parts))
    assert sorted(seen) == [i for i, (query, _) in enumerate(lens) if query]


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("seed", range(60))
def test_what_the_host_reserves_suffices(seed: int, window: int) -> None:
    """Of a step whose lengths it does not know."""
    rule = replace(SMALL, window=window, group=random.Random(seed).choice([1, 2, 16, 24]))
    lens = random_lens(seed)
    queries, kvs = arrays(lens)
    tokens = None if set(queries) == {1} else int(queries.sum())
    limits = limits_of(rule, len(lens), int(kvs.max()), tokens)
    for exact, limit in zip(sizes_of(rule, queries, kvs), limits, strict=True):
        assert exact.items <= limit.items
        assert exact.parts <= limit.parts
        assert exact.tokens <= limit.tokens


def test_one_long_sequence_is_shared_by_all_processors() -> None:
    """Programs take every n-th item: none has much more to read than the average."""
    hardware = tiles.Hardware()
    rule = Rule(group=4, few_rows=16, many_rows=128)
    kvs = np.array([1024] * 63 + [100_000])
    _, chunks = rule.bounds(np.ones(64, np.int64), kvs)
    assert chunks[:63].tolist() == [4] * 63
    assert 16 <= chunks[63] <= rule.max_chunks
    sizes = [(-(-kv // 64) * 64) // n for kv, n in zip(kvs, chunks, strict=True)]
    items = sorted((s for s, n in zip(sizes, chunks, strict=True) for _ in range(n)), reverse=True)
    heads = np.repeat(items, 8)
    programs = 3 * hardware.processors
    loads = np.array([heads[i::programs].sum() for i in range(programs)])
    assert heads.max() * 8 < kvs.sum() / 4  # of eight heads
    # A quarter of the programs suffices to draw all of the memory's bandwidth.
    assert np.sort(loads)[-programs // 4] <= 2.5 * loads.mean()


def outputs(load: Workload, fixed: bool = False) -> list[Tensor]:
    """Of each sequence; ``fixed``: in a step of which the device alone knows the lengths."""
    attention = load.backend("triton")
    metadata = load.metadata()
    if fixed:
        rows, tokens = len(load.lens) + 2, len(load.query) + 5
        attention.plan_fixed(padded(metadata, rows, tokens), 320)
        padding = load.query.new_full((5, *load.query.shape[1:]), float("nan"))
        load.query = torch.cat((load.query, padding))
        load.key, load.value = (
            torch.cat((each, padding[:, : each.shape[1]])) for each in (load.key, load.value)
        )
    else:
        attention.plan(metadata)
    output = load.run(attention)
    if fixed:
        assert not output[-5:].any()
        output = output[:-5]
    return list(output.split([query for query, _ in load.lens]))


def padded(metadata: AttentionMetadata, rows: int, tokens: int) -> AttentionMetadata:
    """Of two sequences of padding, one has three tokens; two tokens are behind all sequences."""
    count, used = len(metadata.kv_lens), len(metadata.slot_mapping)
    starts = metadata.query_start_loc.new_full((rows + 1,), used + 3)
    starts[: count + 1] = metadata.query_start_loc
    slots = metadata.slot_mapping.new_full((tokens,), -1)
    slots[:used] = metadata.slot_mapping
    kv_lens = metadata.kv_lens.new_zeros(rows)
    kv_lens[:count] = metadata.kv_lens
    table = metadata.block_table.new_zeros(rows, 20)
    table[:count, : metadata.block_table.shape[1]] = metadata.block_table
    return AttentionMetadata(starts, kv_lens, table, slots, [], [], 0)


LENS = [(1, 20), (1, 100), (3, 70), (18, 80), (1, 200)]


def part_of(load: Workload, chosen: list[int]) -> Workload:
    """The same sequences in another step."""
    part = Workload.__new__(Workload)
    part.__dict__.update(load.__dict__)
    begins = np.cumsum([0, *(query for query, _ in load.lens)])
    rows = torch.cat([torch.arange(begins[i], begins[i + 1]) for i in chosen]).to(DEVICE)
    part.lens = [load.lens[i] for i in chosen]
    part.tables = [load.tables[i] for i in chosen]
    part.query, part.key, part.value = load.query[rows], load.key[rows], load.value[rows]
    return part


@pytest.mark.parametrize("window", [None, 90])
def test_the_last_bit_does_not_depend_on_the_rest_of_the_step(window: int | None) -> None:
    load = Workload(LENS, heads=4, kv_heads=1, dim=16, window=window)
    together = outputs(load)
    for chosen in ([1], [3, 2], [4, 3, 2, 1, 0]):
        for index, output in zip(chosen, outputs(part_of(load, chosen)), strict=True):
            assert torch.equal(output, together[index])


def test_steps_of_a_fixed_size_have_the_same_bits_and_padding_is_zero() -> None:
    load = Workload(LENS, heads=4, kv_heads=1, dim=16)
    expected = outputs(load)
    for chosen in ([0, 1, 2, 3, 4], [4, 1]):
        got = outputs(part_of(load, chosen), fixed=True)
        assert all(torch.equal(out, expected[i]) for i, out in zip(chosen, got, strict=True))


def test_a_token_among_few_has_the_bits_of_a_decode() -> None:
    """So drafts, which are verified together, are what would have been computed without them."""
    load = Workload([(5, 130)], heads=4, kv_heads=1, dim=16)
    together = outputs(load)[0]
    last = part_of(load, [0])
    for token in (0, 2, 4):
        alone = part_of(load, [0])
        alone.lens = [(1, 126 + token)]
        alone.query, alone.key, alone.value = (
            each[token : token + 1] for each in (last.query, last.key, last.value)
        )
        # What the step before it wrote:
        attention = alone.backend("triton")
        earlier = make_metadata(alone.tables, [5], [130], 16)
        attention.write(0, load.key, load.value, earlier.slot_mapping.to(DEVICE))
        attention.plan(alone.metadata())
        assert torch.equal(alone.run(attention)[0], together[token])


def test_tokens_that_share_a_program_have_the_bits_of_those_with_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens whose parts are summed up: more than programs of their sequence, and fewer."""
    lens = [(11, 130), (1, 100), (6, 20)]
    load = Workload(lens, heads=2, kv_heads=1, dim=16)
    sinks = torch.tensor([0.5, -2.0]).to(DEVICE)
    reference = load.backend("torch")
    reference.plan(load.metadata())
    wanted = load.run(reference, sinks=sinks)
    launches = Launches(monkeypatch)
    outputs = []
    for processors, programs in ((1, 4), (1000, 11)):
        attention = load.backend("triton")
        attention.hardware = replace(attention.hardware, processors=processors)
        attention.plan(load.metadata())
        launches.seen.clear()
        outputs.append(load.run(attention, sinks=sinks))
        grids = [grid for name, grid, *_ in launches.seen if name == "reduce_kernel"]
        assert grids == [(2, programs, len(lens))]
        close(outputs[-1], wanted)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_of_a_cache_of_8_bits(dtype: torch.dtype) -> None:
    """Keys and values far beyond the range of 8-bit floats are kept, and come out as they were."""
    load = Workload([(1, 17), (3, 70), (66, 80)], dtype=dtype, cache_dtype=torch.float8_e4m3fn)
    load.key, load.value = load.key * 1000, load.value * 3000
    load.query = load.query / 1000
    ours, reference = load.backend("triton"), load.backend("torch")
    for attention in (ours, reference):
        assert attention.use_scales({0: KVScales(10.0, 25.0)})
        attention.plan(load.metadata())
    got, wanted = load.run(ours), load.run(reference)
    assert wanted.abs().max() > 1000
    allowed = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(got / 1000, wanted / 1000, atol=allowed, rtol=allowed)
    for mine, theirs in zip(ours.stored, reference.stored, strict=True):
        assert torch.equal(ours.raw(mine), ours.raw(theirs))


@pytest.mark.parametrize("exponent", [-100, 40, 100])
def test_queries_beyond_the_range_of_float16_meet_keys_of_8_bits(exponent: int) -> None:
    load = Workload([(1, 40), (66, 80)], dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn)
    ours, reference = load.backend("triton"), load.backend("torch")
    outputs = []
    for attention in (ours, reference):
        attention.plan(load.metadata())
        attention.write(0, load.key, load.value, attention.planned.slot_mapping)
        query, scale = load.query * 2.0**exponent, 0.125 * 2.0**-exponent
        if attention is ours:
            outputs.append(attention.attend(0, query, scale))
        else:
            outputs.append(attention(0, query, None, None, scale))
    torch.testing.assert_close(*outputs, atol=2e-2, rtol=2e-2)
