"""Sliding windows against transformers' own masks, and with blocks behind them taken away."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tools.checkpoints import make_llama
from tests.tools.paged_run import (
    PagedRun,
    expected,
    kernels_add_up_rows_alike,
    load,
    random_ids,
)

MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
MINISTRAL: dict[str, Any] = {"architectures": ["MinistralForCausalLM"], "model_type": "ministral"}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

CONFIGS: dict[str, dict[str, Any]] = {
    "one position": MISTRAL | {"sliding_window": 1},
    "less than a block": MISTRAL | {"sliding_window": 7},
    "one block": MISTRAL | {"sliding_window": 16},
    "not a multiple of the block": MISTRAL | {"sliding_window": 37},
    "many heads to a key": MISTRAL | {"sliding_window": 50, "num_key_value_heads": 1},
    "longer than the text": MISTRAL | {"sliding_window": 300},
    "as long as the context": MISTRAL | {"sliding_window": 512},
    "by layer": MINISTRAL | {"sliding_window": 37, "layer_types": MIXED},
    "in every layer": MINISTRAL | {"sliding_window": 37},
    "in no layer": MINISTRAL | {"sliding_window": 37, "layer_types": ["full_attention"] * 3},
}


def cut(ids: list[int], *sizes: int) -> list[list[int]]:
    """Into pieces of these sizes, then single tokens."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(ids[start : start + size])
        start += size
    return pieces + [[token] for token in ids[start:]]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_prompt_chunks_and_decodes(name: str, tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model", **CONFIGS[name])
    model = load(path)
    ids = random_ids(200, seed=1)
    wanted = expected(path, ids)
    # Chunks shorter and longer than the window, then decodes that leave blocks behind.
    pieces = cut(ids, 1, 15, 17, 47, 100, 3)
    for backend in ("torch", "cpu"):
        run = PagedRun(model, torch.float32, backend)
        whole = run.step({"a": ids})["a"]
        torch.testing.assert_close(whole, wanted, atol=1e-4, rtol=0)
        pieced = torch.cat([run.step({"b": piece})["b"] for piece in pieces])
        torch.testing.assert_close(pieced, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("overrides", "window"),
    [
        (MISTRAL | {"sliding_window": 37}, 37),
        (MISTRAL | {"sliding_window": None}, None),
        (MISTRAL | {"sliding_window": 512}, None),
        (MISTRAL | {"max_position_embeddings": 8192}, 4096),
        (MINISTRAL | {"sliding_window": 37, "layer_types": MIXED}, None),
        (MINISTRAL | {"sliding_window": 37, "layer_types": MIXED[:1] * 3}, 37),
        ({"sliding_window": 37}, None),  # no Llama has one, whatever its config.json says
    ],
)
def test_the_window_of_a_model_is_that_of_all_its_layers(
    overrides: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    path = make_llama(tmp_path / "model", **overrides)
    assert load(path).kv_window == window
    if "layer_types" in overrides:
        return
    from transformers import AutoConfig

    theirs = getattr(AutoConfig.from_pretrained(path), "sliding_window", None)
    context = json.loads((path / "config.json").read_text())["max_position_embeddings"]
    if overrides.get("model_type") == "mistral":
        assert (window or context) == (theirs or context)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("block_size", [16, 8])
def test_mixed_batches_compute_what_single_sequences_do(
    backend: str, block_size: int, tmp_path: Path
) -> None:
    path = make_llama(tmp_path / "model", **MISTRAL | {"sliding_window": 45})
    lengths = {"a": 1, "b": 16, "c": 90, "d": 90, "e": 200, "f": 33, "g": 300, "h": 17}
    sequences = {name: random_ids(n, seed=n + ord(name)) for name, n in lengths.items()}
    wanted = {name: expected(path, ids) for name, ids in sequences.items()}
    run = PagedRun(load(path), torch.float32, backend, block_size)
    choose = random.Random(5)
    done = dict.fromkeys(sequences, 0)
    got: dict[str, list[Tensor]] = {name: [] for name in sequences}
    while any(done[name] < len(ids) for name, ids in sequences.items()):
        step = {}
        for name, ids in sequences.items():
            if done[name] < len(ids) and choose.random() < 0.8:
                size = choose.choice((1, 1, 5, 30, 30, 130))
                step[name] = ids[done[name] : done[name] + size]
                done[name] += len(step[name])
        if step:
            for name, logits in run.step(step).items():
                got[name].append(logits)
    for name, logits in wanted.items():
        torch.testing.assert_close(torch.cat(got[name]), logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
)
@pytest.mark.parametrize("window", [None, 45, 600])
def test_other_sequences_of_a_step_change_no_bit(
    window: int | None, dtype: torch.dtype, cache_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    # Long enough that kernels cut their sums, and that the long window leaves a first cut behind.
    shape = {"num_attention_heads": 6, "max_position_embeddings": 2048, "num_hidden_layers": 1}
    path = make_llama(tmp_path / "model", dtype=dtype, **MISTRAL | shape, sliding_window=window)
    model = load(path, dtype)
    ids = random_ids(1230, seed=7)
    alone = PagedRun(model, dtype, "cpu", cache_dtype=cache_dtype).step({"a": ids})["a"]
    run = PagedRun(model, dtype, "cpu", cache_dtype=cache_dtype)
    run.step({f"other {n}": random_ids(1 + 90 * n, seed=n) for n in range(8)})
    pieces, start = [], 0
    # Decodes at 171-200 (in fp32 192 is a border), 511 and on, and above 1200.
    for piece in cut(ids, 40, 131, *[1] * 30, 2, 30, 65, 212, *[1] * 9, 130, 460, 100):
        neighbours = {f"other {n}": random_ids(1, seed=start) for n in range(start % 8)}
        pieces.append(run.step({"a": piece, **neighbours})["a"])
        start += len(piece)
    mixed = torch.cat(pieces)
    assert len(mixed) == len(ids)
    if kernels_add_up_rows_alike(dtype):
        assert torch.equal(mixed, alone)
    else:
        atol = 1e-4 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(mixed, alone, atol=atol, rtol=0)
