"""Stacks are taken apart where rules say how, and rows lie one after the other; else not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.core_model_loading import (
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from tests.parity.cases import SMALL
from tgi_cli.models.checkpoint import read_headers, read_tensor
from tgi_cli.models.stored_tensor import StoredTensor
from tgi_cli.quantize import checkpoint_map
from tgi_cli.quantize.checkpoint_map import unstack_experts
from tgi_cli.quantize.checkpoint_writer import take_part, tensors_in, write_file

GATE, UP = "mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"
STACK = "model.layers.0.mlp.experts.gate_up_proj"
MERGED = [MergeModulelist(dim=0), Concatenate(dim=1)]


@pytest.fixture
def whole() -> Any:
    config = MixtralConfig(**SMALL, num_local_experts=3)
    with torch.device("meta"):
        return MixtralForCausalLM(config)


def _stored(shape: tuple[int, ...], file: Path = Path()) -> dict[str, StoredTensor]:
    return {STACK: StoredTensor(STACK, file, shape, "F32")}


def _unstacked(
    model: Any, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, rule: object
) -> dict[str, StoredTensor]:
    monkeypatch.setattr(checkpoint_map, "get_model_conversion_mapping", lambda *_, **__: [rule])
    monkeypatch.setattr(checkpoint_map, "_same_parameters", lambda *_: True)
    return unstack_experts(model, {STACK: torch.empty(shape)}, _stored(shape))


def test_gates_stand_above_ups(whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = WeightConverter([GATE, UP], "mlp.experts.gate_up_proj", MERGED)
    found = _unstacked(whole, (3, 10, 4), monkeypatch, rule)
    path = "model.layers.0.mlp.experts"
    assert {name: each.part for name, each in found.items()} == {
        **{f"{path}.{e}.gate_proj.weight": (e, 0, 5) for e in range(3)},
        **{f"{path}.{e}.up_proj.weight": (e, 5, 10) for e in range(3)},
    }
    assert {each.shape for each in found.values()} == {(5, 4)}
    assert {each.name for each in found.values()} == {STACK}


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        ((3, 9, 4), WeightConverter([GATE, UP], "mlp.experts.gate_up_proj", MERGED)),
        (
            (3, 10, 4),
            WeightConverter([GATE, UP], "mlp.experts.gate_up_proj", [*MERGED, Transpose(1, 2)]),
        ),
        (
            (3, 10, 4),
            WeightConverter([GATE, UP], "mlp.experts.gate_up_proj", [*MERGED, Interleave(1)]),
        ),
        ((3, 10, 4), WeightConverter("x.*.weight", "y", [MergeModulelist(0)])),
    ],
    ids=["odd", "transposed", "in turns", "none"],
)
def test_ambiguous_stacks_are_not_split(
    whole: Any,
    shape: tuple[int, ...],
    rule: WeightConverter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _unstacked(whole, shape, monkeypatch, rule) == _stored(shape)


def test_stacks_that_transformers_would_not_find_are_not_split(
    whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = dict(whole.named_parameters())
    stored = {
        name: StoredTensor(name, Path(), tuple(each.shape), "F32") for name, each in weights.items()
    }
    assert len(unstack_experts(whole, weights, stored)) > len(stored)
    monkeypatch.setattr(checkpoint_map, "apply_renamings", lambda name, _: f"elsewhere.{name}")
    assert unstack_experts(whole, weights, stored) is stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_a_stack_are_copied(dtype: torch.dtype, tmp_path: Path) -> None:
    stack = torch.randn(3, 10, 4).to(dtype)
    save_file({"before": torch.ones(7), STACK: stack}, tmp_path / "model.safetensors")
    entry = read_headers(tmp_path)[STACK]
    part = StoredTensor(STACK, entry.file, (5, 4), entry.dtype, part=(1, 5, 10))
    assert torch.equal(read_tensor(part), stack[1, 5:])
    [whole] = [each for each in tensors_in(entry.file) if each.name == STACK]
    (tmp_path / "out").mkdir()
    write_file(tmp_path / "out" / "model.safetensors", [take_part(whole, "up.weight", part)])
    copied = read_headers(tmp_path / "out")["up.weight"]
    assert copied.shape == (5, 4)
    assert torch.equal(read_tensor(copied), stack[1, 5:])
