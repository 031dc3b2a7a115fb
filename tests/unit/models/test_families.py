"""How families read config.json: what absent keys mean, what is refused, what a model is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.parity.cases import CASES
from tests.parity.families import make_checkpoint
from tests.tools.paged_run import PagedRun, load, random_ids
from tgi_cli.errors import CheckpointError, ModelError, UnsupportedModelError
from tgi_cli.models import read_config
from tgi_cli.models.registry import decoder_spec
from tgi_cli.models.spec import DecoderSpec, MLPSpec

CONFIGS = {
    "Gemma2ForCausalLM": "Gemma2Config",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "GemmaForCausalLM": "GemmaConfig",
    "GraniteForCausalLM": "GraniteConfig",
    "Olmo2ForCausalLM": "Olmo2Config",
    "Olmo3ForCausalLM": "Olmo3Config",
    "Phi3ForCausalLM": "Phi3Config",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
    "SeedOssForCausalLM": "SeedOssConfig",
    "SmolLM3ForCausalLM": "SmolLM3Config",
}

PLAIN = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
)


def read(folder: Path, architecture: str, **values: Any) -> DecoderSpec:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **values}))
    return decoder_spec(read_config(folder))


def facts(spec: DecoderSpec) -> dict[str, Any]:
    layer = spec.layers[0]
    assert isinstance(layer.mlp, MLPSpec)
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": layer.mlp.intermediate_size,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": layer.mixer.num_heads,
        "num_key_value_heads": layer.mixer.num_kv_heads,
        "head_dim": layer.mixer.head_dim,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.final_norm.eps,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "windows": [layer.mixer.window for layer in spec.layers],
        "thetas": [
            None if rope is None else spec.ropes[rope].parameters["rope_theta"]
            for rope in (layer.mixer.rope for layer in spec.layers)
        ],
        "biases": (layer.mixer.bias, layer.mixer.output_bias, layer.mlp.bias),
        "logit_softcap": spec.logit_softcap,
        "softcap": layer.mixer.softcap,
    }


def their_facts(config: Any) -> dict[str, Any]:
    phi = config.model_type == "phi3"  # has no biases, and a window in all layers or none
    kinds = (
        getattr(config, "layer_types", None)
        or ["sliding_attention" if phi else "full_attention"] * config.num_hidden_layers
    )
    window = getattr(config, "sliding_window", None)
    window = None if window is None or window >= config.max_position_embeddings else window
    nested = "full_attention" in config.rope_parameters
    bias = not phi and getattr(config, "attention_bias", config.model_type == "qwen2")
    output_bias = getattr(config, "attention_out_bias", bias and config.model_type != "qwen2")
    rotated = getattr(config, "no_rope_layers", [1] * len(kinds))
    return {
        **{name: getattr(config, name) for name in PLAIN},
        "head_dim": getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        "windows": [window if kind == "sliding_attention" else None for kind in kinds],
        "thetas": [
            (config.rope_parameters[kind] if nested else config.rope_parameters)["rope_theta"]
            if rotates
            else None
            for kind, rotates in zip(kinds, rotated, strict=True)
        ],
        "biases": (bias, output_bias, getattr(config, "mlp_bias", False)),
        "logit_softcap": getattr(config, "final_logit_softcapping", None),
        "softcap": getattr(config, "attn_logit_softcapping", None),
    }


@pytest.mark.parametrize("architecture", CONFIGS)
def test_absent_keys_mean_what_they_mean_to_transformers(architecture: str, tmp_path: Path) -> None:
    theirs = getattr(transformers, CONFIGS[architecture])()
    assert facts(read(tmp_path, architecture)) == their_facts(theirs)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_checkpoints_written_by_transformers_are_read(architecture: str, tmp_path: Path) -> None:
    theirs = getattr(transformers, CONFIGS[architecture])(
        num_attention_heads=4,
        num_key_value_heads=1,
        num_hidden_layers=9,
        max_position_embeddings=3000,
        sliding_window=77,
        use_sliding_window=True,
        attention_bias=True,
        tie_word_embeddings=False,
    )
    theirs.architectures = [architecture]
    theirs.save_pretrained(tmp_path)
    assert facts(decoder_spec(read_config(tmp_path))) == their_facts(theirs)


@pytest.mark.parametrize(
    ("architecture", "values", "error", "message"),
    [
        (
            "Gemma2ForCausalLM",
            {"use_bidirectional_attention": True},
            UnsupportedModelError,
            "use_bidirectional_attention is not supported for Gemma2ForCausalLM",
        ),
        (
            "Gemma3ForCausalLM",
            {"attn_logit_softcapping": 50.0},
            UnsupportedModelError,
            "attn_logit_softcapping is not supported for Gemma3ForCausalLM",
        ),
        (
            "Gemma2ForCausalLM",
            {"final_logit_softcapping": -1.0},
            ModelError,
            "'final_logit_softcapping' is -1.0, must be positive",
        ),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            UnsupportedModelError,
            "rope scaling 'linear' is not supported for Phi3ForCausalLM",
        ),
        (
            "SmolLM3ForCausalLM",
            {"no_rope_layers": [1, 0]},
            ModelError,
            "'no_rope_layers' names 2 of 36 layers",
        ),
        ("GraniteForCausalLM", {"logits_scaling": 0}, ModelError, "'logits_scaling' is 0"),
        (
            "Qwen3ForCausalLM",
            {"layer_types": ["linear_attention"] * 32},
            UnsupportedModelError,
            "layer type 'linear_attention' is not supported for Qwen3ForCausalLM",
        ),
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


def test_a_multimodal_model_loads_under_old_and_new_names(tmp_path: Path) -> None:
    older = make_checkpoint(CASES["Gemma 3 with images"], tmp_path / "older")
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "config.json").write_bytes((older / "config.json").read_bytes())
    tensors = load_file(older / "model.safetensors")
    assert any(name.startswith("vision_tower.") for name in tensors)
    assert all(name.split(".")[0] != "model" for name in tensors)
    renamed = {
        "model." + name.replace("language_model.model.", "language_model."): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, newer / "model.safetensors")
    ids = random_ids(20, seed=1)
    runs = [PagedRun(load(path), torch.float32, "cpu") for path in (older, newer)]
    assert all(run.model.vision is not None for run in runs)
    first, second = (run.step({"a": ids})["a"] for run in runs)
    assert torch.equal(first, second)
    save_file(renamed | {"model.sound_tower.weight": torch.ones(2)}, newer / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 unexpected: model\.sound_tower\.weight"):
        load(newer)


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_older_names_of_longrope_are_read(name: str, tmp_path: Path) -> None:
    scaling = {"type": name, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    spec = read(
        tmp_path,
        "Phi3ForCausalLM",
        max_position_embeddings=131072,
        rope_scaling=scaling,
        original_max_position_embeddings=4096,
    )
    (rope,) = spec.ropes
    assert rope.dims == 96
    assert rope.parameters["rope_type"] == "longrope"
    assert rope.parameters["original_max_position_embeddings"] == 4096
    assert rope.parameters["long_factor"] == [2.0] * 48
