"""Medusa heads and MLP speculators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tools.draft_heads import edit, make_medusa, make_mlp_speculator
from tests.tools.paged_run import CPU, random_ids
from tests.unit.models.speculators.plain import medusa, mlp_speculator
from tests.unit.models.speculators.steps import Entry, Steps, Target, state_of
from tgi_cli.errors import CheckpointError, ModelError, UnsupportedModelError
from tgi_cli.models.speculators.base import Proposer
from tgi_cli.models.speculators.detect import detect
from tgi_cli.models.speculators.load import ProposerOptions, load_proposer


def load(path: Path, count: int = 3, target: Target | None = None) -> Proposer:
    options = ProposerOptions(torch.float32, CPU, count, 128, 16, 4, 64, 256)
    return load_proposer(detect(path), target or Target(64), options)


def drafts_after(proposer: Proposer, tokens: list[int], count: int, wrong: int = 0) -> list[int]:
    """Behind ``count`` tokens of a prompt; a second row, and rejected drafts, stand before them."""
    steps = Steps(proposer, 64, 16)
    steps.add(0, random_ids(30, 9))
    steps.add(1, tokens)
    found = steps.step(Entry(0, 4, 1, proposes=False), Entry(1, count + wrong, wrong))
    assert list(found) == [1]
    return found[1][0]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("layout", ["tgi", "tgi2"])
def test_medusa_heads(tmp_path: Path, layout: str, layers: int) -> None:
    make_medusa(tmp_path, layout, layers=layers)
    target, tokens = Target(64), random_ids(20, 1)
    tensors = load_file(tmp_path / "medusa_lm_head.safetensors")
    head = target.head if layout == "tgi2" else None
    state = state_of(tokens[:7], 64)
    expected = [medusa(tensors, state, layers, head, index) for index in range(3)]
    assert drafts_after(load(tmp_path, target=target), tokens, 7, wrong=2) == expected


def test_medusa_heads_of_vllm(tmp_path: Path) -> None:
    make_medusa(tmp_path, "vllm", layers=2)
    tensors = load_file(tmp_path / "model.safetensors")
    named = {}
    for name, tensor in tensors.items():
        kind, head, *rest = name.split(".")
        if kind == "lm_heads":
            named[f"{head}.2.weight"] = tensor
        else:
            named[f"{head}.{rest[1]}.linear.weight"] = tensor
            named[f"{head}.{rest[1]}.linear.bias"] = torch.zeros(64)
    tokens = random_ids(20, 1)
    state = state_of(tokens[:7], 64)
    expected = [medusa(named, state, 2, None, index) for index in range(3)]
    assert drafts_after(load(tmp_path), tokens, 7) == expected


def test_fewer_heads_than_there_are(tmp_path: Path) -> None:
    tokens = random_ids(20, 1)
    make_medusa(tmp_path / "medusa", "tgi")
    make_mlp_speculator(tmp_path / "mlp")
    make_mlp_speculator(tmp_path / "tied", tied=True)
    for name in ("medusa", "mlp", "tied"):
        whole, part = load(tmp_path / name), load(tmp_path / name, 1)
        assert part.num_drafts == 1
        if name != "tied":
            assert part.weight_bytes < whole.weight_bytes
        assert drafts_after(part, tokens, 7) == drafts_after(whole, tokens, 7)[:1]


def test_more_drafts_than_heads(tmp_path: Path) -> None:
    make_medusa(tmp_path, "tgi")
    with pytest.raises(ModelError, match="drafts 3 tokens, not 4"):
        load(tmp_path, 4)


@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_mlp_speculators(tmp_path: Path, tied: bool, scale_input: bool) -> None:
    make_mlp_speculator(tmp_path, tied=tied, scale_input=scale_input)
    config = json.loads((tmp_path / "config.json").read_text())
    tokens = random_ids(20, 2)
    tensors = load_file(tmp_path / "model.safetensors")
    state = state_of(tokens[:5], 64)
    expected = mlp_speculator(tensors, config, state, tokens[5], 3)
    assert drafts_after(load(tmp_path), tokens, 5, wrong=3) == expected


def test_an_inner_size_of_zero_is_the_target_s(tmp_path: Path) -> None:
    make_mlp_speculator(tmp_path, inner=64)
    whole = drafts_after(load(tmp_path), random_ids(20, 3), 5)
    edit(tmp_path, lambda config, _: config.update(inner_dim=0))
    assert drafts_after(load(tmp_path), random_ids(20, 3), 5) == whole


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"emb_dim": 128}, "'emb_dim' is 128, and the model's is 64"),
        ({"vocab_size": 300}, "'vocab_size' is 300, and the model's is 256"),
        ({"inner_dim": -1}, "'inner_dim' is -1"),
        ({"n_predict": 1, "tie_weights": True}, "a single stage has tied weights"),
    ],
)
def test_mlp_speculators_of_another_model(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    make_mlp_speculator(tmp_path)
    edit(tmp_path, lambda config, _: config.update(values))
    with pytest.raises(ModelError, match=message):
        load(tmp_path, 1)


def test_medusa_heads_of_another_model(tmp_path: Path) -> None:
    make_medusa(tmp_path / "wide", "tgi", size=96)
    with pytest.raises(CheckpointError, match="of another shape"):
        load(tmp_path / "wide")
    make_medusa(tmp_path / "own", "vllm")
    edit(tmp_path / "own", lambda config, _: config.update(truncated_vocab_size=100))
    with pytest.raises(UnsupportedModelError, match="vocabulary of their own"):
        load(tmp_path / "own")


def test_what_they_take(tmp_path: Path) -> None:
    proposer = load(make_medusa(tmp_path, "tgi2"))
    assert proposer.needs == "final"
    assert proposer.block_bytes == 0
    assert proposer.weight_bytes == 3 * (64 * 64 + 64) * 4
