"""What families with recurrent states read in config.json, and what they refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from tgi_cli.errors import ModelError, UnsupportedModelError
from tgi_cli.models import model_facts, read_config
from tgi_cli.models.registry import decoder_spec
from tgi_cli.models.spec import ConvSpec, DecoderSpec, MoESpec, RopeSpec, SSMSpec
from tgi_cli.models.weight_map import Source

CONFIGS = {
    "BambaForCausalLM": "BambaConfig",
    "GraniteMoeHybridForCausalLM": "GraniteMoeHybridConfig",
    "Lfm2ForCausalLM": "Lfm2Config",
    "Lfm2MoeForCausalLM": "Lfm2MoeConfig",
    "Lfm3ForCausalLM": "Lfm3Config",
    "NemotronHForCausalLM": "NemotronHConfig",
}
LAYERS = {"layer_types": ["conv", "full_attention"] * 16}
"""transformers has no default for the layers of Lfm2MoeConfig."""


def read(folder: Path, architecture: str, **values: Any) -> DecoderSpec:
    raw = {"architectures": [architecture], "model_type": model_type(architecture)} | values
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return comparable(decoder_spec(read_config(folder)))


def model_type(architecture: str) -> str:
    kind: str = getattr(transformers, CONFIGS[architecture]).model_type
    return kind


def comparable(spec: DecoderSpec) -> DecoderSpec:
    """Without the function that maps names, and with one spelling of rotary parameters."""
    ropes = tuple(
        replace(rope, parameters={"rope_type": "default", **rope.parameters})
        for rope in spec.ropes
        if isinstance(rope, RopeSpec)
    )
    return replace(spec, source=no_source, ropes=ropes)


def no_source(name: str) -> Source:
    return Source((name,))


@pytest.mark.parametrize("architecture", CONFIGS)
def test_absent_keys_mean_what_they_mean_to_transformers(architecture: str, tmp_path: Path) -> None:
    values = LAYERS if architecture == "Lfm2MoeForCausalLM" else {}
    theirs = getattr(transformers, CONFIGS[architecture])(**values)
    theirs.architectures = [architecture]
    theirs.save_pretrained(tmp_path / "written")
    written = comparable(decoder_spec(read_config(tmp_path / "written")))
    assert read(tmp_path / "bare", architecture, **values) == written
    assert len(written.layers) == theirs.num_hidden_layers


def test_facts_of_a_model_with_few_layers_of_attention(tmp_path: Path) -> None:
    read(tmp_path, "BambaForCausalLM", attn_layer_indices=[3, 9], dtype="bfloat16")
    facts = model_facts(read_config(tmp_path))
    assert facts.kv_bytes_per_token == 2 * 2 * 8 * 128
    assert facts.num_kv_heads == 8


def test_layers_of_nemotron_are_letters_or_names(tmp_path: Path) -> None:
    names = ["mamba", "mlp", "attention", "moe"]
    by_letters = read(tmp_path, "NemotronHForCausalLM", hybrid_override_pattern="M-*E")
    assert by_letters == read(tmp_path, "NemotronHForCausalLM", layers_block_type=names)
    assert [(layer.mixer is None, layer.mlp is None) for layer in by_letters.layers] == [
        (False, True),
        (True, False),
        (False, True),
        (True, False),
    ]
    mamba, experts = by_letters.layers[0].mixer, by_letters.layers[3].mlp
    assert isinstance(mamba, SSMSpec)
    assert mamba.min_step == 0.001
    assert isinstance(experts, MoESpec)
    assert not experts.gated


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ({"intermediate_size": 6656}, 4608),
        ({"intermediate_size": 10240, "block_ffn_dim_multiplier": 1.3}, 8960),
        ({"block_ff_dim": 6656, "block_auto_adjust_ff_dim": False}, 6656),
        ({"intermediate_size": 6655, "block_ffn_dim_multiplier": None}, 4436),
    ],
)
def test_the_width_of_lfm2_is_adjusted(values: dict[str, Any], size: int, tmp_path: Path) -> None:
    spec = read(tmp_path, "Lfm2ForCausalLM", **values, full_attn_idxs=[2])
    assert spec.layers[0].mlp.intermediate_size == size  # type: ignore[union-attr]
    assert spec.layers[0].mixer == ConvSpec(kernel=3)


MAMBA = "GraniteMoeHybridForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "values", "error", "message"),
    [
        (MAMBA, {"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act 'gelu' is not supp"),
        (MAMBA, {"mamba_d_head": 63}, ModelError, "128 heads of 63 are not 8192 channels"),
        (MAMBA, {"mamba_n_groups": 3}, ModelError, "128 heads cannot be divided among 3 groups"),
        (MAMBA, {"mamba_d_conv": 1}, ModelError, "'mamba_d_conv' is 1, not from 2 to 64"),
        (MAMBA, {"time_step_limit": [2, 1]}, ModelError, "no range"),
        (MAMBA, {"time_step_limit": [0, "much"]}, ModelError, "has 'much', not a number"),
        (MAMBA, {"time_step_limit": 1}, ModelError, "'time_step_limit' is 1, not two numbers"),
        (
            MAMBA,
            {"layer_types": ["sliding_attention"] * 32},
            UnsupportedModelError,
            "layer type 'sliding_attention' is not supported for GraniteMoeHybridForCausalLM",
        ),
        (
            "NemotronHForCausalLM",
            {"attention_bias": True},
            UnsupportedModelError,
            "attention_bias is not supported for NemotronHForCausalLM",
        ),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "MX"}, ModelError, "is 'MX', not of"),
        ("NemotronHForCausalLM", {"time_step_min": -1.0}, ModelError, "'time_step_min' is -1.0"),
        ("Lfm2ForCausalLM", {"conv_L_cache": 65}, ModelError, "'conv_L_cache' is 65"),
    ],
)
def test_unimplemented_options_are_refused_by_name(
    architecture: str,
    values: dict[str, Any],
    error: type[ModelError],
    message: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=message):
        read(tmp_path, architecture, **values)
