"""Mixtures of experts in the forms that checkpoints have them in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.parity.cases import CASES
from tests.parity.families import make_checkpoint
from tests.tools.paged_run import PagedRun, expected, load, random_ids
from tests.tools.thread_shards import sharded_logits
from tgi_cli.errors import CheckpointError, UnsupportedModelError
from tgi_cli.models import load_model, model_facts, read_config

IDS = random_ids(60, seed=4)


def logits(path: Path) -> Tensor:
    return PagedRun(load(path), torch.float32, "torch").step({"a": IDS})["a"]


def edit(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Write a checkpoint's tensors anew."""
    file = path / "model.safetensors"
    tensors = change(load_file(file))
    file.unlink()
    save_file({name: t.contiguous() for name, t in tensors.items()}, file, {"format": "pt"})


def configure(path: Path, **values: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def quantize(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts with random 4-bit weights, as gpt-oss is published."""
    generator = torch.Generator().manual_seed(1)
    packed = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, size, out = packed.pop(name).shape
            shape = (experts, out, size // 32, 16)
            blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
            packed[f"{name}_blocks"] = blocks
            packed[f"{name}_scales"] = torch.randint(
                121, 124, shape[:-1], generator=generator, dtype=torch.uint8
            )
            assert tensor.shape[1] % 32 == 0
    return packed


def dequantize(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As transformers does."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    dense = dict(tensors)
    for name in tensors:
        if name.endswith("_blocks"):
            name = name.removesuffix("_blocks")
            blocks, scales = dense.pop(f"{name}_blocks"), dense.pop(f"{name}_scales")
            dense[name] = convert_moe_packed_tensors(blocks, scales).float()
    return dense


def test_gpt_oss_in_four_bits(tmp_path: Path) -> None:
    path = make_checkpoint(CASES["gpt-oss"], tmp_path)
    edit(path, quantize)
    configure(path, quantization_config={"quant_method": "mxfp4"})
    packed = logits(path)
    for shard in sharded_logits(path, 2, [IDS]):
        torch.testing.assert_close(shard, packed, atol=1e-4, rtol=0)

    edit(path, dequantize)
    with pytest.raises(CheckpointError, match="gate_up_proj_blocks"):
        load(path)  # what config.json says is what is looked for
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(path), packed)
    torch.testing.assert_close(packed, expected(path, IDS), atol=1e-4, rtol=0)


def test_blocks_of_another_shape_are_named(tmp_path: Path) -> None:
    path = make_checkpoint(CASES["gpt-oss"], tmp_path)
    edit(path, quantize)
    configure(path, quantization_config={"quant_method": "mxfp4"}, intermediate_size=64)
    with pytest.raises(
        CheckpointError, match=r"gate_up_proj_blocks \[6, 192, 2, 16\] and .* instead of \[64, 64\]"
    ):
        load(path)


@pytest.mark.parametrize(
    "name",
    ["Mixtral", "Qwen 2 MoE", "Qwen 3 MoE", "LFM 2 MoE", "Granite 4", "Nemotron 3, latent experts"],
)
def test_experts_in_stacks(name: str, tmp_path: Path) -> None:
    path = make_checkpoint(CASES[name], tmp_path)
    wanted = logits(path)
    file = path / "model.safetensors"
    names = set(load_file(file))
    config = (path / "config.json").read_text()
    model = AutoModelForCausalLM.from_pretrained(path)
    model.save_pretrained(path, save_original_format=False)
    (path / "config.json").write_text(config)
    newer = set(load_file(file))
    assert any(each.endswith("experts.down_proj") for each in newer - names), "no stacks"
    assert torch.equal(logits(path), wanted)


def test_mixtral_with_experts_one_by_one_under_newer_names(tmp_path: Path) -> None:
    path = make_checkpoint(CASES["Mixtral"], tmp_path)
    wanted = logits(path)
    newer = {
        "block_sparse_moe": "mlp",
        ".w1.": ".gate_proj.",
        ".w3.": ".up_proj.",
        ".w2.": ".down_proj.",
    }

    def rename(name: str) -> str:
        for old, new in newer.items():
            name = name.replace(old, new)
        return name

    edit(path, lambda tensors: {rename(name): each for name, each in tensors.items()})
    assert torch.equal(logits(path), wanted)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    path = make_checkpoint(CASES["Mixtral"], tmp_path)
    lost = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    edit(path, lambda tensors: {k: v for k, v in tensors.items() if k != lost})
    with pytest.raises(CheckpointError, match=f"1 missing: {lost}"):
        load(path)


def test_options_that_are_not_implemented_are_named(tmp_path: Path) -> None:
    path = make_checkpoint(CASES["gpt-oss"], tmp_path)
    configure(path, swiglu_limit=5.0)
    with pytest.raises(UnsupportedModelError, match=r"swiglu_limit 5\.0"):
        model_facts(read_config(path))
    configure(path, swiglu_limit=7.0, quantization_config={"quant_method": "aqlm"})
    with pytest.raises(UnsupportedModelError, match="aqlm"):
        model_facts(read_config(path))


def test_dummy_weights(tmp_path: Path) -> None:
    path = make_checkpoint(CASES["Qwen 3 MoE"], tmp_path)
    (path / "model.safetensors").unlink()
    model = load_model(read_config(path), torch.float32, torch.device("cpu"), load_format="dummy")
    out = PagedRun(model, torch.float32, "torch").step({"a": IDS})["a"]
    assert out.isfinite().all()
    assert out.std() > 0
