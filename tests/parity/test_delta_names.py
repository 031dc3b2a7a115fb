"""Linear attention under the names that published checkpoints have, and transformers 5 has not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.parity.cases import CASES
from tests.parity.families import make_checkpoint, random_ids
from tests.parity.test_moe_families import configure
from tests.tools.paged_run import PagedRun, load
from tgi_cli.errors import CheckpointError, ModelError, UnsupportedModelError
from tgi_cli.models import model_facts, read_config

Tensors = dict[str, Tensor]


def _olmo(tensors: Tensors) -> Tensors:
    """Convolutions of the sizes of their parts; a norm of attention layers by its own name."""
    made = {}
    for name, tensor in tensors.items():
        if "_conv1d" in name:
            continue
        attends = name.replace("feedforward_layer_norm.weight", "self_attn.q_proj.weight")
        if "feedforward_layer_norm" in name and attends in tensors:
            name = name.replace("feedforward_layer_norm", "post_attention_layernorm")
        made[name] = tensor
    for name in [name for name in tensors if "q_conv1d" in name]:
        parts = [tensors[name.replace("q_conv1d", f"{part}_conv1d")] for part in "qkv"]
        whole = torch.cat(parts)
        for part, tensor in zip("qkv", whole.split([32, 32, 96]), strict=True):
            made[name.replace("q_conv1d", f"{part}_conv1d")] = tensor.contiguous()
    return made


def _kimi(tensors: Tensors) -> Tensors:
    """The dense blocks of the first layers by their own name."""
    return {
        name.replace("layers.0.block_sparse_moe", "layers.0.mlp"): tensor
        for name, tensor in tensors.items()
    }


def _qwen(tensors: Tensors) -> Tensors:
    """The text part of a multimodal model, beside the others."""
    inner = {name.replace("model.", "model.language_model."): t for name, t in tensors.items()}
    others = ("mtp.fc.weight", "model.visual.patch_embed.proj.weight")
    return inner | {name: torch.ones(2, 2) for name in others}


def _logits(path: Path) -> Tensor:
    return PagedRun(load(path), torch.float32, "torch").step({"a": random_ids(40, seed=1)})["a"]


@pytest.mark.parametrize(
    ("name", "rename"), [("OLMo Hybrid", _olmo), ("Kimi Linear", _kimi), ("Qwen 3.5", _qwen)]
)
def test_published_names(name: str, rename: Callable[[Tensors], Tensors], tmp_path: Path) -> None:
    path = make_checkpoint(CASES[name], tmp_path)
    wanted = _logits(path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    renamed = rename(tensors)
    assert renamed.keys() != tensors.keys()
    save_file(renamed, file, metadata={"format": "pt"})
    assert torch.equal(_logits(path), wanted)


def test_a_tensor_that_is_missing_is_named_as_the_checkpoint_names_it(tmp_path: Path) -> None:
    path = make_checkpoint(CASES["Qwen3-Next"], tmp_path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.linear_attn.in_proj_qkvz.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 missing: .*layers\.1\.linear_attn\.in_proj_qkvz"):
        load(path)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"hidden_act": "gelu"}, UnsupportedModelError, "activation 'gelu'"),
        ({"linear_num_key_heads": 3}, ModelError, "4 value heads cannot share 3 key heads"),
        ({"linear_conv_kernel_dim": 1}, ModelError, "'linear_conv_kernel_dim' is 1, not 2 to 64"),
        ({"layer_types": ["mamba2"] * 4}, UnsupportedModelError, "layer type 'mamba2'"),
    ],
)
def test_what_cannot_be_run_is_named(
    change: dict[str, object], error: type[Exception], says: str, tmp_path: Path
) -> None:
    path = make_checkpoint(CASES["Qwen 3.5"], tmp_path)
    configure(path, **change)
    with pytest.raises(error, match=says):
        model_facts(read_config(path))
