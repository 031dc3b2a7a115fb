"""What an adapter's folder may hold, and what is said of one that does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tools.checkpoints import make_llama
from tests.tools.lora_adapters import make_adapter
from tgi_cli.errors import CheckpointError, CorruptFileError, ModelError, UnsupportedModelError
from tgi_cli.layers.lora import LoraPair, LoraTable
from tgi_cli.models import CausalLM, load_model, read_config
from tgi_cli.models.lora import adapter_rank, lora_targets, read_adapter

CPU = torch.device("cpu")
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("base"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def model(base: Path) -> CausalLM:
    table = LoraTable(2, 8, 16)
    model = load_model(read_config(base), torch.float32, CPU, lora=table)
    table.allocate(torch.float32, CPU)
    return model


def read(folder: Path, model: CausalLM) -> list[LoraPair]:
    targets = lora_targets(model)
    table = next(iter(targets.values()))[0].layer.table
    return read_adapter(folder, targets, table, pin=False)


def change(folder: Path, **tensors: Any) -> Path:
    """Add or replace tensors of an adapter; ``None`` removes one."""
    file = folder / "adapter_model.safetensors"
    held = {name: tensor for name, tensor in load_file(file).items() if name not in tensors}
    save_file(held | {k: v for k, v in tensors.items() if v is not None}, file)
    return folder


def test_a_merged_layer_takes_each_part_and_the_scale(
    base: Path, model: CausalLM, tmp_path: Path
) -> None:
    folder = make_adapter(base, tmp_path, modules=("q_proj", "v_proj"), rank=4, alpha=12)
    pairs = read(folder, model)
    assert [pair.layer.parts[pair.part].name for pair in pairs] == ["q_proj", "v_proj"]
    stored = load_file(folder / "adapter_model.safetensors")
    assert torch.equal(pairs[0].a, stored[f"{Q}.lora_A.weight"])
    assert torch.equal(pairs[0].b, 3 * stored[f"{Q}.lora_B.weight"].T)


def test_names_without_the_base_models_prefix(base: Path, model: CausalLM, tmp_path: Path) -> None:
    folder = make_adapter(base, tmp_path, modules=("q_proj",))
    stored = load_file(folder / "adapter_model.safetensors")
    renamed = {name.replace("model.model.", "model."): t for name, t in stored.items()}
    save_file(renamed, folder / "adapter_model.safetensors")
    assert len(read(folder, model)) == 1


@pytest.mark.parametrize(
    ("tensors", "config", "kind", "says", "advice"),
    [
        (
            {f"{Q}.lora_A.weight": torch.zeros(4, 63)},
            {},
            CheckpointError,
            r"layers.0.self_attn.q_proj has A \[4, 63\].*64 inputs and 128 outputs",
            "another base",
        ),
        (
            {f"{Q}.lora_B.weight": torch.zeros(127, 4)},
            {},
            CheckpointError,
            r"q_proj has .* B \[127, 4\]",
            "another base",
        ),
        (
            {f"{Q}.lora_B.weight": torch.zeros(128, 5)},
            {},
            CheckpointError,
            r"B \[128, 5\]",
            "another base",
        ),
        (
            {f"{Q}.lora_A.weight": torch.zeros(9, 64), f"{Q}.lora_B.weight": torch.zeros(128, 9)},
            {},
            UnsupportedModelError,
            "q_proj has rank 9, and there is room for 8",
            "--max-lora-rank 9",
        ),
        (
            {f"{Q}.lora_B.weight": torch.full((128, 4), float("nan"))},
            {},
            CheckpointError,
            "q_proj holds NaN",
            "train it again",
        ),
        (
            {f"{Q}.lora_B.weight": None},
            {},
            CheckpointError,
            "q_proj has only one of lora_A and lora_B",
            "",
        ),
        (
            {
                f"{Q.replace('q_proj', 'qkv')}.lora_{x}.weight": torch.zeros(4, 4)
                for x in ("A", "B")
            },
            {},
            CheckpointError,
            "self_attn.qkv, which is no linear layer of this model",
            "another base",
        ),
        (
            {f"base_model.model.lm_head.lora_{x}.weight": torch.zeros(4, 4) for x in ("A", "B")},
            {},
            UnsupportedModelError,
            "lm_head: adapters of the output head",
            "--merge-lora",
        ),
        (
            {
                f"base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_{x}.weight": (
                    torch.zeros(4, 4)
                )
                for x in ("A", "B")
            },
            {},
            UnsupportedModelError,
            "adapters of experts, one by one",
            "--merge-lora",
        ),
        (
            {
                f"base_model.model.model.embed_tokens.lora_embedding_{x}": torch.zeros(4, 4)
                for x in ("A", "B")
            },
            {},
            UnsupportedModelError,
            "LoRA of embeddings",
            "PEFT",
        ),
        (
            {"base_model.model.lm_head.modules_to_save.weight": torch.zeros(4, 4)},
            {"modules_to_save": ["lm_head"]},
            UnsupportedModelError,
            "replaces lm_head.weight",
            "--merge-lora",
        ),
        (
            {f"{Q}.bias": torch.zeros(128)},
            {"bias": "lora_only"},
            UnsupportedModelError,
            "replaces model.layers.0.self_attn.q_proj.bias",
            "--merge-lora",
        ),
        ({}, {"use_dora": True}, UnsupportedModelError, "DoRA", "PEFT"),
        ({}, {"peft_type": "IA3"}, UnsupportedModelError, "IA3", "PEFT"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_unsupported_models_are_refused_by_name(
    base: Path,
    model: CausalLM,
    tmp_path: Path,
    tensors: dict[str, Any],
    config: dict[str, Any],
    kind: type[ModelError],
    says: str,
    advice: str,
) -> None:
    folder = change(make_adapter(base, tmp_path, modules=("q_proj",), **config), **tensors)
    with pytest.raises(kind, match=says) as caught:
        read(folder, model)
    assert advice in caught.value.remedy


def test_adapter_weights_that_overflow_the_models_dtype_are_refused(
    base: Path, tmp_path: Path
) -> None:
    table = LoraTable(1, 8, 16)
    model = load_model(read_config(base), torch.float16, CPU, lora=table)
    table.allocate(torch.float16, CPU)
    table.dtype = torch.float16  # as on an accelerator
    big = {f"{Q}.lora_B.weight": torch.full((128, 4), 1e5)}
    folder = change(make_adapter(base, tmp_path, modules=("q_proj",)), **big)
    with pytest.raises(CheckpointError, match=r"too large for torch\.float16"):
        read_adapter(folder, lora_targets(model), table, pin=False)


def test_an_adapter_that_changes_nothing(base: Path, model: CausalLM, tmp_path: Path) -> None:
    names = {f"{Q}.lora_{x}.weight": None for x in ("A", "B")}
    folder = change(make_adapter(base, tmp_path, modules=("q_proj",)), **names)
    with pytest.raises(CheckpointError, match="changes nothing"):
        read(folder, model)


def test_an_adapter_without_a_usable_configuration_is_refused(
    base: Path, model: CausalLM, tmp_path: Path
) -> None:
    folder = make_adapter(base, tmp_path, modules=("q_proj",))
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json"):
        read(tmp_path / "nowhere", model)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    with pytest.raises(CheckpointError, match="r and lora_alpha for model"):
        read(folder, model)


def test_the_rank_of_an_adapter(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(base, tmp_path, rank=4, rank_pattern={"q_proj": 6, "v_proj": 2})
    assert adapter_rank(folder) == 6
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({"r": 0}))
    with pytest.raises(CheckpointError, match="no rank"):
        adapter_rank(folder)
    config.write_text("{")
    with pytest.raises(CorruptFileError):
        adapter_rank(folder)
    config.unlink()
    with pytest.raises(CheckpointError, match="it is no adapter"):
        adapter_rank(folder)
