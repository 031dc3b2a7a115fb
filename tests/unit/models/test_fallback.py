"""How a model of transformers is built, named and filled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests.parity.cases import LLAMA3_ROPE, LONGROPE, SMALL, YARN_ROPE, Case
from tests.parity.families import make_checkpoint, random_ids
from tests.tools.lora_adapters import make_adapter
from tests.tools.paged_run import PagedRun, expected, load
from tgi_cli.config import ModelFacts
from tgi_cli.errors import CheckpointError, UnsupportedModelError
from tgi_cli.hub.merge_lora import merge
from tgi_cli.layers.lora import LoraTable
from tgi_cli.models import load_model, model_facts, read_config
from tgi_cli.models.hf.model import TransformersForCausalLM
from tgi_cli.models.lora import lora_targets, read_adapter

CPU = torch.device("cpu")
GLM_MOE = SMALL | {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "head_dim": 16,
}
WINDOWS = SMALL | {"num_hidden_layers": 4, "sliding_window": 40}


def test_facts_come_from_a_dry_run_without_weights(tmp_path: Path) -> None:
    path = make_checkpoint(Case("Cohere2Config", WINDOWS), tmp_path)
    (path / "model.safetensors").unlink()
    assert model_facts(read_config(path)) == ModelFacts(
        architecture="Cohere2ForCausalLM",
        model_type="cohere2",
        dtype="float32",
        vocab_size=256,
        max_position_embeddings=256,
        eos_token_ids=(2,),
        kv_bytes_per_token=2 * 4 * 2 * 16,
    )


def test_windows_are_those_of_the_masks(tmp_path: Path) -> None:
    model = load(make_checkpoint(Case("Cohere2Config", WINDOWS), tmp_path))
    assert [spec.window for spec in model.kv_specs] == [40, 40, 40, None]


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        ("CohereConfig", LLAMA3_ROPE),
        ("HeliumConfig", YARN_ROPE),
        ("NemotronConfig", {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}),
        ("ArceeConfig", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        (
            "Ernie4_5Config",
            LONGROPE
            | {
                "short_factor": [1.0 + i / 9 for i in range(8)],
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 256,
            },
        ),
        ("Glm4MoeConfig", {"rope_type": "default", "rope_theta": 1e4}),
        ("OPTConfig", None),
    ],
)
def test_buffers_are_those_that_transformers_has(config: str, rope: Any, tmp_path: Path) -> None:
    values = GLM_MOE if "Moe" in config else SMALL | {"head_dim": 16}
    path = make_checkpoint(Case(config, values | {"rope_parameters": rope}), tmp_path)
    theirs = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_buffers())
    ours = dict(load(path).named_buffers())
    assert set(ours) == set(theirs)
    for name, buffer in theirs.items():
        assert torch.equal(ours[name], buffer), name
        assert ours[name].dtype == buffer.dtype


def test_weights_that_are_kept_in_float32_are(tmp_path: Path) -> None:
    path = make_checkpoint(Case("Glm4MoeConfig", GLM_MOE), tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    wanted = {n: p.dtype for n, p in theirs.state_dict().items() if p.dtype != torch.bfloat16}
    assert wanted, "the case shows nothing"
    ours = load(path, torch.bfloat16).state_dict()
    assert {n: p.dtype for n, p in ours.items() if p.dtype == torch.float32} == wanted


def test_a_base_models_names_are_understood(tmp_path: Path) -> None:
    path = make_checkpoint(Case("CohereConfig", SMALL), tmp_path)
    file = path / "model.safetensors"
    ids = random_ids(30, seed=0)
    wanted = PagedRun(load(path), torch.float32, None).step({"a": ids})["a"]
    shorter = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    save_file(shorter, file, metadata={"format": "pt"})
    assert torch.equal(PagedRun(load(path), torch.float32, None).step({"a": ids})["a"], wanted)


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    path = make_checkpoint(Case("Glm4MoeConfig", GLM_MOE), tmp_path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.experts\."):
        load(path)


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    path = make_checkpoint(Case("CohereConfig", SMALL), tmp_path)
    file = path / "model.safetensors"
    odd = {"model.layers.0.self_attn.q_proj.odd": torch.zeros(3)}
    save_file(load_file(file) | odd, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 unexpected: .*q_proj\.odd"):
        load(path)


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    path = make_checkpoint(Case("CohereConfig", SMALL), tmp_path)
    file = path / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(load_file(file) | {name: torch.zeros(5, 64)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight \[5, 64\]"):
        load(path)


@pytest.mark.parametrize("config", ["CohereConfig", "Glm4MoeConfig"])
def test_dummy_weights(config: str, tmp_path: Path) -> None:
    path = make_checkpoint(Case(config, GLM_MOE), tmp_path)
    (path / "model.safetensors").unlink()
    model = load_model(read_config(path), torch.float32, CPU, load_format="dummy")
    logits = PagedRun(model, torch.float32, None).step({"a": random_ids(20, seed=0)})["a"]
    assert logits.isfinite().all()
    assert logits.std() > 0


def test_a_linear_layer_has_a_weight_with_a_dtype(tmp_path: Path) -> None:
    values = SMALL | {"num_experts": 4, "moe_topk": 2, "head_dim": 16}
    path = make_checkpoint(Case("HunYuanMoEV1Config", values), tmp_path)
    ids = random_ids(40, seed=0)
    ours = PagedRun(load(path), torch.float32, None).step({"a": ids})["a"]
    torch.testing.assert_close(ours, expected(path, ids), atol=1e-4, rtol=0)


def test_adapters_apply(tmp_path: Path) -> None:
    base = make_checkpoint(Case("CohereConfig", SMALL), tmp_path / "base")
    modules = ("q_proj", "o_proj", "gate_proj", "down_proj")
    adapter = make_adapter(base, tmp_path / "adapter", modules=modules)
    merged = tmp_path / "merged"
    merged.mkdir()
    merge(adapter, base, merged)
    table = LoraTable(2, 4, 64)
    model = load_model(read_config(base), torch.float32, CPU, lora=table)
    table.allocate(torch.float32, CPU)
    table.put(1, read_adapter(adapter, lora_targets(model), table, pin=False))
    table.plan([-1, 1], torch.tensor([-1] * 20 + [1] * 25, dtype=torch.int32))
    ids = random_ids(25, seed=0)
    got = PagedRun(model, torch.float32, None).step({"base": ids[:20], "adapted": ids})
    for name, path in (("base", base), ("adapted", merged)):
        wanted = expected(path, ids)[: len(got[name])]
        torch.testing.assert_close(got[name], wanted, atol=1e-4, rtol=0)


_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OddConfig(LlamaConfig):
    model_type = "odd"

class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 3
        return output
"""


def test_code_that_comes_with_a_checkpoint_runs_if_trusted_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    path = make_checkpoint(Case("LlamaConfig", SMALL), tmp_path / "odd_model")
    ids = random_ids(30, seed=0)
    wanted = 3 * expected(path, ids)
    (path / "odd.py").write_text(_CODE)
    stored = json.loads((path / "config.json").read_text()) | {
        "architectures": ["OddForCausalLM"],
        "model_type": "odd",
        "auto_map": {
            "AutoConfig": "odd.OddConfig",
            "AutoModelForCausalLM": "odd.OddForCausalLM",
        },
    }
    (path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(UnsupportedModelError, match="code that comes with") as caught:
        model_facts(read_config(path))
    assert "--trust-remote-code" in caught.value.remedy
    config = read_config(path, trust_remote_code=True)
    assert model_facts(config).model_type == "odd"
    model = load_model(config, torch.float32, CPU)
    assert isinstance(model, TransformersForCausalLM)
    ours = PagedRun(model, torch.float32, None).step({"a": ids})["a"]
    torch.testing.assert_close(ours, wanted, atol=3e-4, rtol=0)


def test_transformers_itself_is_left_as_it_was(tmp_path: Path) -> None:
    path = make_checkpoint(Case("CohereConfig", SMALL), tmp_path)
    load(path)
    config: PretrainedConfig = transformers.AutoConfig.from_pretrained(path)
    theirs = AutoModelForCausalLM.from_pretrained(path)
    assert config._attn_implementation is None
    assert theirs.config._attn_implementation == "sdpa"
    assert theirs(torch.tensor([[5, 6, 7]])).logits.isfinite().all()
