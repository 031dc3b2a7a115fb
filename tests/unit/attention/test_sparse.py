"""Attention to chosen tokens and blocks, against attention written out with masks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.tools.paged_run import CPU, kernels_add_up_rows_alike, make_metadata
from tests.unit.attention.workload import FP8
from tgi_cli.attention import KVSpec, PagedAttention, attention_name, create_attention
from tgi_cli.attention.sparse import (
    BlockRule,
    ChosenRows,
    Pools,
    attend_chosen,
    choose_blocks,
    choose_tokens,
)

BLOCK, HEADS, INDEX_HEADS, DIM = 16, 6, 5, 32
COUNT = 24
RULE = BlockRule(size=12, count=3, local=2)
SCALE = 0.2
Rule = BlockRule | Pools | None
LATENT = KVSpec(1, 48, value_dim=DIM, values_in_keys=True)
GROUPED = KVSpec(2, DIM)


@dataclass
class Text:
    """What a layer makes of the tokens of a text, at random."""

    length: int
    seed: int
    spec: KVSpec = LATENT
    dtype: torch.dtype = torch.float32
    index_heads: int = INDEX_HEADS
    parts: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        spec = self.spec
        for name, shape in {
            "index_query": (self.index_heads, DIM),
            "index_key": (DIM,),
            "weights": (self.index_heads,),
            "query": (HEADS, spec.head_dim),
            "key": (spec.num_kv_heads, spec.head_dim),
            "value": (spec.num_kv_heads, spec.value_width),
        }.items():
            numbers = torch.randn(self.length, *shape, generator=generator)
            self.parts[name] = numbers.to(self.dtype)
        if spec.values_in_keys:
            self.parts["value"] = self.parts["key"][..., : spec.value_width]

    def cut(self, begin: int, end: int) -> dict[str, Tensor]:
        return {name: part[begin:end] for name, part in self.parts.items()}


class Layer:
    """Texts through an indexer and attention, in steps of any composition."""

    def __init__(
        self,
        backend: str,
        spec: KVSpec = LATENT,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        rule: Rule = None,
        sinks: Tensor | None = None,
    ) -> None:
        index = KVSpec(1, DIM, values_in_keys=True, index=True)
        self.attention = create_attention(backend, [index, spec], BLOCK, dtype, CPU, cache_dtype)
        self.attention.allocate(100)
        for cache in self.attention.stored:
            cache.fill_(float("nan"))
        self.rule, self.sinks, self.spec = rule, sinks, spec
        self.free = random.Random(0).sample(range(100), 100)
        self.tables: dict[str, list[int]] = {}
        self.lens: dict[str, int] = {}

    def choose(self, parts: dict[str, Tensor]) -> ChosenRows | None:
        query, key = parts["index_query"], parts["index_key"]
        if isinstance(self.rule, BlockRule):
            return choose_blocks(self.attention, 0, query, key, self.rule)
        weights = parts["weights"]
        return choose_tokens(self.attention, 0, query, key, weights, COUNT, self.rule)

    def step(self, texts: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
        order = sorted(texts, key=lambda name: len(texts[name]["query"]) != 1)
        query_lens = [len(texts[name]["query"]) for name in order]
        for name, count in zip(order, query_lens, strict=True):
            self.lens[name] = self.lens.get(name, 0) + count
            table = self.tables.setdefault(name, [])
            while len(table) * BLOCK < self.lens[name]:
                table.append(self.free.pop())
        kv_lens, tables = [self.lens[n] for n in order], [self.tables[n] for n in order]
        self.attention.plan(make_metadata(tables, query_lens, kv_lens, BLOCK))
        parts = {part: torch.cat([texts[name][part] for name in order]) for part in texts[order[0]]}
        value = None if self.spec.values_in_keys else parts["value"]
        with torch.inference_mode():
            output = attend_chosen(
                self.attention,
                1,
                parts["query"],
                (parts["key"], value),
                SCALE,
                self.choose(parts),
                self.sinks,
            )
        return dict(zip(order, torch.split(output, query_lens), strict=True))

    def in_pieces(self, texts: dict[str, Text], seed: int = 3) -> dict[str, Tensor]:
        """All texts, cut at random, their last tokens one by one."""
        choose = random.Random(seed)
        done = dict.fromkeys(texts, 0)
        got: dict[str, list[Tensor]] = {name: [] for name in texts}
        while any(done[name] < text.length for name, text in texts.items()):
            step = {}
            for name, text in texts.items():
                begin = done[name]
                if begin < text.length and choose.random() < 0.8:
                    size = 1 if text.length - begin < 8 else choose.choice((1, 3, 17, 40))
                    done[name] = min(begin + size, text.length)
                    step[name] = text.cut(begin, done[name])
            for name, output in self.step(step).items() if step else ():
                got[name].append(output)
        return {name: torch.cat(pieces) for name, pieces in got.items()}


def weighed(keys: Tensor, positions: Tensor) -> Tensor:
    """Keys of pools that depend on each of their tokens, and on where they are."""
    assert torch.equal(positions, torch.arange(keys.shape[1]) * keys.shape[2])
    shares = torch.linspace(0.5, 1.5, keys.shape[2])[:, None] / keys.shape[2]
    return (keys * shares).sum(2) * (1 + positions[:, None] % 7 / 10)


POOLS = Pools(4, weighed)


def seen_by(text: Text, rule: Rule = None) -> Tensor:
    """bool [heads, queries, keys], which tokens the queries attend to."""
    query, key = text.parts["index_query"].float(), text.parts["index_key"].float()
    products = torch.einsum("qhd,kd->hqk", query, key)
    visible = torch.ones(text.length, text.length, dtype=torch.bool).tril()
    chosen = torch.zeros(HEADS, text.length, text.length, dtype=torch.bool)
    weights = text.parts["weights"].float()
    size = rule.size if isinstance(rule, Pools) else 1
    if isinstance(rule, Pools):
        complete = text.length // size * size
        pools = weighed(key[:complete].view(1, -1, size, DIM), torch.arange(0, complete, size))
        products = torch.einsum("qhd,kd->hqk", query, pools[0])
    for position in range(text.length):
        own = products[:, position, : (position + 1) // size]
        if not isinstance(rule, BlockRule):
            scores = weights[position] @ own.relu()
            best = scores.sort(descending=True, stable=True).indices[: COUNT // size]
            for first in (best * size).tolist():
                chosen[:, position, first : first + size] = True
            chosen[:, position, (position + 1) // size * size :] = size > 1
            continue
        blocks = [part.amax(-1) for part in torch.split(own, rule.size, dim=-1)]
        for head, scores in enumerate(torch.stack(blocks, -1)):
            last = position // rule.size
            scores[max(0, last - rule.local + 1) :] = float("inf")
            share = HEADS // len(own)
            for block in scores.sort(descending=True, stable=True).indices[: rule.count].tolist():
                keys = slice(block * rule.size, (block + 1) * rule.size)
                chosen[head * share : (head + 1) * share, position, keys] = True
    return chosen & visible


def expected(text: Text, seen: Tensor, sinks: Tensor | None = None) -> Tensor:
    """float64 [T, heads, width] of attention to the tokens that are ``seen``."""
    share = HEADS // text.spec.num_kv_heads
    query = text.parts["query"].double()
    key, value = (text.parts[n].double().repeat_interleave(share, 1) for n in ("key", "value"))
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(-1, text.length, 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


LENGTHS = {"long": 130, "short": COUNT, "longer": 59, "one more": COUNT + 1, "one": 1}


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_each_query_attends_to_the_best_tokens(backend: str, with_sinks: bool) -> None:
    sinks = torch.linspace(-2, 2, HEADS) if with_sinks else None
    texts = {name: Text(length, seed=length) for name, length in LENGTHS.items()}
    got = Layer(backend, sinks=sinks).in_pieces(texts)
    for name, text in texts.items():
        wanted = expected(text, seen_by(text), sinks)
        torch.testing.assert_close(got[name].double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_each_query_attends_to_the_best_pools_and_what_is_behind_them(backend: str) -> None:
    whole = COUNT + POOLS.size
    lengths = LENGTHS | {"no pool more": whole - 1, "a pool more": whole, "tail": whole + 3}
    texts = {name: Text(length, seed=length) for name, length in lengths.items()}
    got = Layer(backend, rule=POOLS).in_pieces(texts)
    for name, text in texts.items():
        wanted = expected(text, seen_by(text, POOLS))
        torch.testing.assert_close(got[name].double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_each_head_attends_to_its_best_blocks(backend: str) -> None:
    limit = RULE.size * RULE.count
    lengths = {"long": 150, "short": limit, "one more": limit + 1, "others": 77}
    texts = {name: Text(length, length, GROUPED, index_heads=2) for name, length in lengths.items()}
    got = Layer(backend, GROUPED, rule=RULE).in_pieces(texts)
    for name, text in texts.items():
        wanted = expected(text, seen_by(text, RULE))
        torch.testing.assert_close(got[name].double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("rule", [None, RULE])
def test_bfloat16_loses_no_more_than_its_rounding(backend: str, rule: BlockRule | None) -> None:
    spec, heads = (LATENT, INDEX_HEADS) if rule is None else (GROUPED, 2)
    text = Text(120, 1, spec, torch.bfloat16, heads)
    got = Layer(backend, spec, torch.bfloat16, rule=rule).in_pieces({"a": text})["a"]
    wanted = expected(text, seen_by(text, rule))
    torch.testing.assert_close(got.double(), wanted, atol=0.03, rtol=0)


def test_of_equal_scores_the_first_are_chosen() -> None:
    text = Text(90, seed=4)
    text.parts["index_key"][:] = text.parts["index_key"][0]
    text.parts["weights"].abs_()
    seen = torch.ones(HEADS, 90, 90, dtype=torch.bool).tril()
    seen[..., COUNT:] = False
    seen[:, :COUNT] = torch.ones(HEADS, COUNT, 90, dtype=torch.bool).tril()
    got = Layer("cpu").in_pieces({"a": text})["a"]
    torch.testing.assert_close(got.double(), expected(text, seen), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", [None, RULE, POOLS])
def test_neither_cuts_nor_other_texts_change_a_bit(dtype: torch.dtype, rule: Rule) -> None:
    if not kernels_add_up_rows_alike(dtype):
        pytest.skip("the products of this processor depend on the number of rows")
    spec, heads = (GROUPED, 2) if rule is RULE else (LATENT, INDEX_HEADS)
    texts = {n: Text(length, length, spec, dtype, heads) for n, length in LENGTHS.items()}
    alone = {
        name: Layer("cpu", spec, dtype, rule=rule).step({name: text.cut(0, text.length)})[name]
        for name, text in texts.items()
    }
    for seed in range(3):
        got = Layer("cpu", spec, dtype, rule=rule).in_pieces(texts, seed)
        for name in texts:
            assert torch.equal(got[name], alone[name])


def test_texts_that_are_short_enough_are_attended_to_as_ever() -> None:
    text = Text(COUNT, seed=2)
    layer, plain = Layer("cpu"), Layer("cpu")
    got = layer.step({"a": text.cut(0, COUNT)})["a"]
    plain.attention.plan(make_metadata([plain.free[-2:]], [COUNT], [COUNT], BLOCK))
    wanted = plain.attention(1, text.parts["query"], text.parts["key"], None, SCALE)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize(("backend", "dtype"), [("torch", torch.float32), ("cpu", torch.bfloat16)])
@pytest.mark.parametrize("cache_dtype", [None, *FP8])
def test_single_tokens_are_read_as_they_were_written(
    backend: str, dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> None:
    specs = [KVSpec(3, 32, value_dim=48), LATENT]
    attention = create_attention(backend, specs, 32, dtype, CPU, cache_dtype)
    attention.allocate(4)
    slots = torch.randperm(4 * 32)
    for layer, spec in enumerate(specs):
        key = torch.randn(len(slots), spec.num_kv_heads, spec.head_dim).to(dtype)
        value = torch.randn(len(slots), spec.num_kv_heads, spec.value_width).to(dtype)
        attention.write(layer, key, None if spec.values_in_keys else value, slots)
        wanted = torch.randint(len(slots), (5, 1, 7))
        heads = torch.arange(spec.num_kv_heads)[:, None]
        keys, values = attention.read(layer, slots[wanted], heads)
        kept = key if cache_dtype is None else key.to(cache_dtype).to(dtype)
        assert torch.equal(keys, kept[wanted, heads])
        if not spec.values_in_keys:
            kept = value if cache_dtype is None else value.to(cache_dtype).to(dtype)
        assert torch.equal(values, kept[wanted, heads])


def test_a_second_plan_leaves_the_first_as_it_was() -> None:
    for backend in ("torch", "cpu"):
        attention: PagedAttention = create_attention(
            backend, [KVSpec(1, 16)], BLOCK, torch.float32, CPU
        )
        attention.allocate(4)
        tokens = torch.randn(20, 1, 16)
        attention.plan(make_metadata([[2, 0]], [20], [20], BLOCK))
        wanted = attention(0, tokens, tokens, tokens, 1.0)
        second = attention.beside()
        second.plan(make_metadata([[2]], [3], [9], BLOCK))
        part = second(0, tokens[6:9], None, None, 1.0)
        assert torch.equal(attention(0, tokens, None, None, 1.0), wanted)
        torch.testing.assert_close(part, wanted[6:9])


def test_kernels_over_tiles_are_not_given_index_keys() -> None:
    index = KVSpec(1, 32, values_in_keys=True, index=True)
    chosen = create_attention(None, [index, LATENT], BLOCK, torch.bfloat16, CPU)
    assert attention_name(chosen) == "cpu"
    with pytest.raises(ValueError, match="kernels"):
        create_attention("native", [index, LATENT], BLOCK, torch.bfloat16, CPU)
