"""Layers of a model divided into stages: which, and what each stage loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.cases import CASES
from tests.parity.families import make_checkpoint
from tests.tools.checkpoints import make_llama
from tgi_cli.device.distributed import Shard
from tgi_cli.errors import CheckpointError, ConfigError, UnsupportedModelError
from tgi_cli.models import CausalLM, load_model, read_config
from tgi_cli.models.stages import check_stages, divide
from tgi_cli.models.weight_filling import layer_slots

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("layers", "head", "stages", "sizes"),
    [
        ([1] * 4, 0, 2, [2, 2]),
        ([1] * 4, 2, 2, [3, 1]),
        ([1] * 5, 0, 2, [2, 3]),
        ([1] * 7, 1, 4, [2, 2, 2, 1]),
        ([1] * 3, 50, 3, [1, 1, 1]),
        ([9, 1, 1, 1], 0, 2, [1, 3]),
        ([1] * 80, 3, 1, [80]),
        ([5, 5, 1, 1, 1, 1, 1, 1], 2, 2, [2, 6]),
    ],
)
def test_the_largest_stage_is_as_small_as_can_be(
    layers: list[int], head: int, stages: int, sizes: list[int]
) -> None:
    ranges = divide(layers, head, stages)
    assert [len(each) for each in ranges] == sizes
    assert [index for each in ranges for index in each] == list(range(len(layers)))


def load_stage(path: Path, stage: int, stages: int) -> CausalLM:
    shard = Shard(stage=stage, stages=stages)
    return load_model(read_config(path), torch.float32, CPU, shard=shard)


def loaded(path: Path, stage: int, stages: int) -> set[str]:
    """The model's names of the tensors that a stage has loaded."""
    slots = [slot for _, slots in layer_slots(load_stage(path, stage, stages)) for slot in slots]
    return {slot.name for slot in slots}


@pytest.mark.parametrize("tied", [True, False])
def test_stages_hold_the_model_and_nothing_twice_but_a_tied_table(
    tied: bool, tmp_path: Path
) -> None:
    path = make_llama(tmp_path, num_hidden_layers=5, tie_word_embeddings=tied)
    whole = loaded(path, 0, 1)
    first, middle, last = (loaded(path, stage, 3) for stage in range(3))
    assert first | middle | last == whole
    assert not first & middle
    assert not middle & last
    assert first & last == ({"model.embed_tokens.weight"} if tied else set())
    assert "model.embed_tokens.weight" in first
    assert all(name.startswith("model.layers.") for name in middle)
    assert "model.norm.weight" in last


def test_every_stage_checks_the_whole_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = make_llama(tmp_path, num_hidden_layers=4)
    file = path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.3.mlp.over_proj.weight"] = torch.zeros(3)
    save_file(tensors, file)
    for stage in (0, 1):
        with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj.*over_proj"):
            load_stage(path, stage, 2)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("Qwen 3.5", "layers without attention"),
        ("Gemma 3n", "share keys and values|streams that all layers"),
    ],
)
def test_models_whose_layers_need_more_are_refused(case: str, says: str, tmp_path: Path) -> None:
    config = read_config(make_checkpoint(CASES[case], tmp_path))
    with pytest.raises(UnsupportedModelError, match=says) as caught:
        check_stages(config, 2)
    assert "--pipeline-parallel-size 2" in caught.value.cause
    assert "--num-shard" in caught.value.remedy


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    config = read_config(make_llama(tmp_path, num_hidden_layers=2))
    check_stages(config, 2)
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size 3 .* 2 layers"):
        check_stages(config, 3)
