"""What the configurations of DeepSeek and its descendants mean."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.parity.cases import Case
from tests.parity.families import make_checkpoint
from tgi_cli.attention import KVSpec
from tgi_cli.errors import ModelError, UnsupportedModelError
from tgi_cli.models import load_model, model_facts, read_config
from tgi_cli.models.registry import decoder_spec
from tgi_cli.models.spec import DecoderSpec, LatentSpec, MLPSpec, MoESpec

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def written(path: Path, **values: Any) -> Path:
    (path / "config.json").write_text(json.dumps(V3 | values))
    return path


def spec_of(path: Path, **values: Any) -> DecoderSpec:
    return decoder_spec(read_config(written(path, **values)))


def mixer_of(spec: DecoderSpec) -> LatentSpec:
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, LatentSpec)
    return mixer


def test_a_row_of_latents_is_all_that_is_cached(tmp_path: Path) -> None:
    facts = model_facts(read_config(written(tmp_path)))
    assert facts.kv_bytes_per_token == 61 * (512 + 64)
    assert facts.num_heads == 128
    assert facts.num_kv_heads is None, "shards have the rows whole, however many they are"
    assert facts.dense_positions is None


def test_yarn_changes_the_scale_of_scores_and_not_the_angles(tmp_path: Path) -> None:
    magnitude = 0.1 * math.log(40) + 1
    assert mixer_of(spec_of(tmp_path)).scale == pytest.approx(192**-0.5 * magnitude**2)
    lite = V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707}
    scale = mixer_of(spec_of(tmp_path, rope_scaling=lite)).scale
    assert scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    assert mixer_of(spec_of(tmp_path, rope_scaling=None)).scale == pytest.approx(192**-0.5)
    silent = V3["rope_scaling"] | {"mscale_all_dim": 0}
    assert mixer_of(spec_of(tmp_path, rope_scaling=silent)).scale == pytest.approx(192**-0.5)


def test_experts_are_behind_the_dense_layers(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    assert [type(layer.mlp) for layer in spec.layers[:4]] == [MLPSpec] * 3 + [MoESpec]
    experts = spec.layers[3].mlp
    assert isinstance(experts, MoESpec)
    assert (experts.num_experts, experts.top_k) == (256, 8)
    assert (experts.num_groups, experts.top_groups, experts.best_of_group) == (8, 4, 2)
    assert experts.router_correction
    steps = spec_of(tmp_path, moe_layer_freq=2)
    assert [layer for layer in range(9) if isinstance(steps.layers[layer].mlp, MoESpec)] == [
        4,
        6,
        8,
    ]


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    assert spec_of(tmp_path).ignored == (r"model\.layers\.61\..*",)


@pytest.mark.parametrize(
    "values",
    [
        {"topk_method": "greedy"},
        {"scoring_func": "softmax"},
        {"mlp_layer_types": ["dense"] * 60 + ["other"]},
        {"architectures": ["DeepseekV2ForCausalLM"], "num_experts_per_tok": 6}
        | {"norm_topk_prob": True},
    ],
)
def test_other_ways_to_choose_experts_are_refused(values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="is not supported for Deepseek"):
        spec_of(tmp_path, **values)


def test_groups_that_cannot_be_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="256 experts in 3 groups"):
        spec_of(tmp_path, n_group=3, topk_group=2)


SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}


def test_kimi_k25_is_known_by_its_published_name(tmp_path: Path) -> None:
    config = transformers.Kimi_K25Config(text_config={"model_type": "kimi_k2", **SMALL})
    config.architectures = ["KimiK25ForConditionalGeneration"]
    config.dtype = "float32"
    config.save_pretrained(tmp_path)
    facts = model_facts(read_config(tmp_path))
    assert facts.architecture == "KimiK25ForConditionalGeneration"
    assert facts.kv_bytes_per_token == 2 * (16 + 8)


def test_an_indexer_caches_a_key_per_token(tmp_path: Path) -> None:
    facts = model_facts(read_config(written(tmp_path, architectures=["DeepseekV32ForCausalLM"])))
    assert facts.kv_bytes_per_token == 61 * (512 + 64 + 128)
    assert facts.dense_positions is None
    spec = spec_of(tmp_path, architectures=["DeepseekV32ForCausalLM"], index_topk=512)
    indexer = mixer_of(spec).indexer
    assert indexer is not None
    assert (indexer.num_heads, indexer.head_dim, indexer.top_k) == (64, 128, 512)
    assert mixer_of(spec_of(tmp_path)).indexer is None


@pytest.mark.parametrize("values", [{"q_lora_rank": None}, {"index_head_dim": 32}])
def test_an_indexer_that_cannot_be_is_an_error(values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="index"):
        spec_of(tmp_path, architectures=["DeepseekV32ForCausalLM"], **values)


@pytest.mark.parametrize("served", [None, 97, 96])
@pytest.mark.parametrize("name", ["DeepseekV32", "GlmMoeDsa"])
def test_an_indexer_is_left_out_where_it_would_choose_every_token(
    name: str, served: int | None, tmp_path: Path
) -> None:
    sizes = SMALL | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 96}
    case = Case(f"{name}Config", sizes | {"first_k_dense_replace": 1})
    config = read_config(make_checkpoint(case, tmp_path))
    assert model_facts(config).kv_bytes_per_token == 2 * (16 + 8 + 16)
    model = load_model(config, torch.float32, torch.device("cpu"), max_positions=served)
    latent = KVSpec(1, 24, value_dim=16, values_in_keys=True)
    index = KVSpec(1, 16, values_in_keys=True, index=True)
    kept = served != 96
    assert sorted(model.kv_specs, key=lambda spec: spec.index) == [latent] * 2 + [index] * 2 * kept
    assert any("indexer" in parameter for parameter, _ in model.named_parameters()) == kept
