"""How families with linear attention read config.json, and what their sequences keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tgi_cli.layers import Build
from tgi_cli.models import read_config
from tgi_cli.models.decoder import DecoderForCausalLM
from tgi_cli.models.registry import decoder_spec, model_facts
from tgi_cli.models.spec import AttentionSpec, DecoderSpec, DeltaSpec, LatentSpec, MoESpec, RopeSpec
from tgi_cli.quantization import Unquantized

CONFIGS = {
    "Qwen3NextForCausalLM": "Qwen3NextConfig",
    "Qwen3_5ForCausalLM": "Qwen3_5TextConfig",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeTextConfig",
    "OlmoHybridForCausalLM": "OlmoHybridConfig",
    "KimiLinearForCausalLM": "KimiLinearConfig",
}
PLAIN = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "layer_types",
)


def facts(spec: DecoderSpec) -> dict[str, Any]:
    mixers = [layer.mixer for layer in spec.layers]
    delta = next(mixer for mixer in mixers if isinstance(mixer, DeltaSpec))
    attention = next(m for m in mixers if isinstance(m, AttentionSpec | LatentSpec))
    experts = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoESpec)]
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": attention.num_heads,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.final_norm.eps,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "layer_types": [
            "linear_attention" if isinstance(mixer, DeltaSpec) else "full_attention"
            for mixer in mixers
        ],
        "delta": (delta.num_key_heads, delta.num_value_heads, delta.key_dim, delta.value_dim),
        "taps": delta.conv_kernel,
        "rotated": [
            (rope.dims, rope.parameters["rope_theta"])
            for rope in spec.ropes
            if isinstance(rope, RopeSpec)
        ],
        "experts": (len(experts), *{(each.num_experts, each.top_k) for each in experts}),
    }


def their_facts(config: Any) -> dict[str, Any]:
    kimi, olmo = config.model_type == "kimi_linear", config.model_type == "olmo_hybrid"
    heads = config.linear_num_heads if kimi else config.linear_num_key_heads
    size = config.linear_head_dim if kimi else config.linear_key_head_dim
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = parameters.get("partial_rotary_factor", 1.0)
    sparse = getattr(config, "num_experts", 0)
    layers = config.num_hidden_layers
    dense = config.mlp_layer_types.count("dense") if kimi else 0
    return {
        **{name: getattr(config, name) for name in PLAIN},
        "delta": (
            heads,
            heads if kimi else config.linear_num_value_heads,
            size,
            size if kimi else config.linear_value_head_dim,
        ),
        "taps": config.linear_conv_kernel_dim,
        "rotated": [] if kimi else [(int(head_dim * share), parameters["rope_theta"])],
        "experts": (layers - dense, (sparse, config.num_experts_per_tok))
        if sparse and not olmo
        else (0,),
    }


@pytest.mark.parametrize("architecture", CONFIGS)
def test_absent_keys_mean_what_they_mean_to_transformers(architecture: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    theirs = getattr(transformers, CONFIGS[architecture])()
    assert facts(decoder_spec(read_config(tmp_path))) == their_facts(theirs)


def test_a_sequence_keeps_what_its_sizes_say(tmp_path: Path) -> None:
    """Qwen 3.5 with 0.8 billion parameters: 12 KiB per token and 18.6 MiB beside them."""
    text = {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    }
    stated = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "dtype": "bfloat16",
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(stated | {"tie_word_embeddings": True}))
    config = read_config(tmp_path)
    assert model_facts(config).kv_bytes_per_token * torch.bfloat16.itemsize == 12 * 1024
    build = Build(torch.bfloat16, Unquantized())
    model = DecoderForCausalLM(decoder_spec(config), build, torch.device("cpu"))
    assert len(model.kv_specs) == 6
    assert len(model.state_specs) == 18
    kept = sum(tensor.nbytes for spec in model.state_specs for tensor in spec.tensors)
    convolution, state = 3 * (2 + 1) * 16 * 128 * 2, 16 * 128 * 128 * 4
    assert kept == 18 * (convolution + state)
    assert round(kept / 2**20, 1) == 18.6
