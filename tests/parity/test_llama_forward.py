"""The Llama family against transformers' own implementation, in float32."""

from __future__ import annotations

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

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mqa": {"num_key_value_heads": 1},
    "mha": {"num_key_value_heads": 8},
    "derived head_dim": {"head_dim": None},
    "head_dim 20": {"head_dim": 20},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "untied": {"tie_word_embeddings": False},
    "older rope keys": {
        "rope_parameters": None,
        "rope_theta": 500.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
    "yarn with mscale": {"rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.7}},
    "yarn with betas": {
        "rope_parameters": YARN
        | {"beta_fast": 8, "beta_slow": 2, "attention_factor": 1.1, "truncate": False}
    },
    "longrope": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "long_factor": [1.0 + i / 4 for i in range(8)],
            "short_factor": [1.0] * 8,
            "original_max_position_embeddings": 64,
        }
    },
    "gelu": {"hidden_act": "gelu"},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_prompt_chunks_and_decodes(name: str, tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model", **CONFIGS[name])
    model = load(path)
    ids = random_ids(150, seed=1)
    wanted = expected(path, ids)
    # Chunks that end before, at and after block borders, then decodes.
    pieces, start = [], 0
    for size in (1, 15, 17, 47, 64, *[1] * 6):
        pieces.append(ids[start : start + size])
        start += size
    got = {}
    for backend in ("torch", "cpu"):
        run = PagedRun(model, torch.float32, backend)
        got[f"{backend}, whole"] = run.step({"a": ids})["a"]
        got[f"{backend}, in pieces"] = torch.cat([run.step({"b": piece})["b"] for piece in pieces])
    assert {way: (logits - wanted).abs().max().item() < 1e-4 for way, logits in got.items()} == (
        dict.fromkeys(got, True)
    )


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_mixed_batches_compute_what_single_sequences_do(backend: str, tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model")
    model = load(path)
    sequences = {
        name: random_ids(length, seed)
        for seed, (name, length) in enumerate(
            {"a": 1, "b": 16, "c": 90, "d": 90, "e": 200, "f": 33, "g": 300, "h": 17}.items()
        )
    }
    wanted = {name: expected(path, ids) for name, ids in sequences.items()}
    run = PagedRun(model, torch.float32, backend)
    choose = random.Random(5)
    done = dict.fromkeys(sequences, 0)
    got: dict[str, list[Tensor]] = {name: [] for name in sequences}
    while True:
        step = {}
        for name, ids in sequences.items():
            if done[name] < len(ids) and choose.random() < 0.8:
                size = choose.choice((1, 1, 5, 30, 30, 130))
                step[name] = ids[done[name] : done[name] + size]
                done[name] += len(step[name])
        if step:
            for name, logits in run.step(step).items():
                got[name].append(logits)
        if all(done[name] == len(ids) for name, ids in sequences.items()):
            break
    for name, logits in wanted.items():
        torch.testing.assert_close(torch.cat(got[name]), logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_sequences_of_a_step_change_no_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    # Three queries to a KV head and a long sum: where kernels would go other ways.
    shape: dict[str, Any] = {"num_attention_heads": 6, "intermediate_size": 1536}
    model = load(make_llama(tmp_path / "model", dtype=dtype, **shape), dtype)
    ids = random_ids(203, seed=7)
    alone = PagedRun(model, dtype, "cpu").step({"a": ids})["a"]
    run = PagedRun(model, dtype, "cpu")
    run.step({f"other {n}": random_ids(1 + 9 * n, seed=n) for n in range(12)})
    pieces, start = [], 0
    for size in (1, 2, 30, 1, 1, 65, 3, *[1] * 100):
        neighbours = {f"other {n}": random_ids(1, seed=start) for n in range(start % 12)}
        new = {f"new {start}": random_ids(11, seed=start)} if start % 3 else {}
        pieces.append(run.step({"a": ids[start : start + size], **neighbours, **new})["a"])
        start += size
    mixed = torch.cat(pieces)
    if kernels_add_up_rows_alike(dtype):
        assert torch.equal(mixed, alone)
    else:
        atol = 1e-4 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(mixed, alone, atol=atol, rtol=0)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_bfloat16_stays_near_float32(backend: str, tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model", dtype=torch.bfloat16)
    ids = random_ids(100, seed=2)
    wanted = expected(path, ids)
    theirs = expected(path, ids, torch.bfloat16)
    run = PagedRun(load(path, torch.bfloat16), torch.bfloat16, backend)
    ours = torch.cat(
        [run.step({"a": ids[:95]})["a"], *[run.step({"a": [i]})["a"] for i in ids[95:]]]
    )

    def error(logits: Tensor) -> float:
        return (logits - wanted).square().mean().sqrt().item()

    assert error(ours) < 0.05 * wanted.std().item()
    assert error(ours) < 1.5 * error(theirs)


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    ids = random_ids(20, seed=3)
    single = PagedRun(load(make_llama(tmp_path / "one")), torch.float32, "cpu")
    several = PagedRun(load(make_llama(tmp_path / "three", files=3)), torch.float32, "cpu")
    assert torch.equal(single.step({"a": ids})["a"], several.step({"a": ids})["a"])
