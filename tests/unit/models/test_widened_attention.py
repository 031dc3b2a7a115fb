"""Families whose layers share caches, see chunks, or have heads of several sizes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tgi_cli.errors import ModelError, UnsupportedModelError
from tgi_cli.layers import Build
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.config_fields import alibi_slopes
from tgi_cli.models.decoder import DecoderForCausalLM
from tgi_cli.models.registry import decoder_spec, model_facts
from tgi_cli.quantization import Unquantized

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 40,
    "dtype": "float32",
}
PAIRS = {"layer_types": ["sliding_attention", "full_attention"] * 3}


def config(tmp_path: Path, architecture: str, **changes: object) -> ModelConfig:
    return ModelConfig(tmp_path, architecture, SMALL | changes, {})


def model(read: ModelConfig) -> DecoderForCausalLM:
    build = Build(torch.float32, Unquantized())
    return DecoderForCausalLM(decoder_spec(read), build, torch.device("cpu"))


@pytest.mark.parametrize(
    ("architecture", "changes", "caches", "numbers"),
    [
        # Two kinds with two heads of 16 and of 32; the last three layers have no cache.
        ("Gemma4ForCausalLM", {"num_kv_shared_layers": 3, "global_head_dim": 32}, 3, 64 + 128 + 64),
        (
            "Gemma4ForCausalLM",
            {
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
                "global_head_dim": 32,
            },
            6,
            3 * 64 + 3 * 64,
        ),
        ("Gemma3nForCausalLM", {"num_kv_shared_layers": 4}, 2, 2 * 64),
        ("Llama4ForCausalLM", {"layer_types": None}, 6, 6 * 64),
        ("FalconForCausalLM", {"alibi": True, "multi_query": True}, 6, 6 * 2 * 8),
    ],
)
def test_sizes_count_each_cache_once(
    architecture: str, changes: dict[str, Any], caches: int, numbers: int, tmp_path: Path
) -> None:
    read = config(tmp_path, architecture, **(PAIRS | changes))
    specs = model(read).kv_specs
    assert len(specs) == caches
    assert sum(spec.numbers for spec in specs) == numbers
    assert model_facts(read).kv_bytes_per_token == numbers


def test_layers_share_the_last_cache_of_their_kind(tmp_path: Path) -> None:
    spec = decoder_spec(config(tmp_path, "Gemma4ForCausalLM", num_kv_shared_layers=2, **PAIRS))
    assert [layer.mixer.cache for layer in spec.layers] == [None, None, None, None, 2, 3]


def test_no_cache_of_its_kind_to_share_is_an_error(tmp_path: Path) -> None:
    read = config(tmp_path, "Gemma4ForCausalLM", num_kv_shared_layers=5, **PAIRS)
    with pytest.raises(ModelError, match="num_kv_shared_layers"):
        decoder_spec(read)


def test_unused_projections_of_a_checkpoint_are_those_of_sharing_layers(tmp_path: Path) -> None:
    spec = decoder_spec(config(tmp_path, "Gemma4ForCausalLM", num_kv_shared_layers=2, **PAIRS))
    ignored = re.compile("|".join(spec.ignored))
    assert ignored.fullmatch("model.layers.5.self_attn.k_proj.weight")
    assert not ignored.fullmatch("model.layers.3.self_attn.k_proj.weight")
    assert not ignored.fullmatch("model.layers.5.self_attn.q_proj.weight")


def test_chunks_bound_what_is_kept_as_windows_do(tmp_path: Path) -> None:
    chunked = {"attention_chunk_size": 32, "no_rope_layers": [1] * 6}
    assert model(config(tmp_path, "Llama4ForCausalLM", **chunked)).kv_window == 32
    mixed = {"attention_chunk_size": 32, "no_rope_layers": [1, 1, 0, 1, 1, 1]}
    assert model(config(tmp_path, "Llama4ForCausalLM", **mixed)).kv_window is None


def test_gemma_4_as_an_encoder_is_refused(tmp_path: Path) -> None:
    read = config(tmp_path, "Gemma4ForCausalLM", use_bidirectional_attention="all")
    with pytest.raises(UnsupportedModelError, match="without causality"):
        decoder_spec(read)


def test_slopes_are_those_of_the_power_of_two_below_and_some_of_the_one_above() -> None:
    assert alibi_slopes(8) == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(6) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
