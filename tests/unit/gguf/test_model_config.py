"""config.json of a file's keys."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.unit.gguf.test_reader import (
    ARRAY,
    BOOL,
    FLOAT32,
    STRING,
    UINT32,
    array,
    header,
    key,
    text,
)
from tgi_cli.errors import CorruptFileError, ModelError, UnsupportedModelError
from tgi_cli.gguf.model_config import ARCHITECTURES, model_config
from tgi_cli.gguf.reader import GGUFFile, read_gguf
from tgi_cli.models.registry import FAMILIES

LLAMA = {
    "block_count": 2,
    "context_length": 1024,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5e5,
}


def encoded(name: str, value: Any) -> bytes:
    if isinstance(value, bool):
        return key(name, BOOL, bytes([value]))
    if isinstance(value, int):
        return key(name, UINT32, struct.pack("<I", value))
    if isinstance(value, float):
        return key(name, FLOAT32, struct.pack("<f", value))
    if isinstance(value, str):
        return key(name, STRING, text(value))
    kind = BOOL if isinstance(value[0], bool) else UINT32
    data = bytes(value) if kind == BOOL else struct.pack(f"<{len(value)}I", *value)
    return key(name, ARRAY, array(kind, len(value), data))


def make(
    folder: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Sequence[tuple[str, Sequence[int]]] = (),
    data: bytes = b"",
) -> GGUFFile:
    """A file in float32 with a table of 10 tokens, and ``tensors`` by dimensions as stored."""
    every = [("token_embd.weight", (64, 10)), *tensors]
    placed, offset = [], 0
    for name, dims in every:
        placed.append((name, dims, 0, offset))
        size = 4
        for each in dims:
            size *= each
        offset += -(-size // 32) * 32
    entries = [encoded("general.architecture", architecture)]
    for name, value in keys.items():
        whole = name.startswith(("tokenizer.", "general."))
        full = name if whole else f"{architecture}.{name}"
        entries.append(encoded(full, value))
    content = header(entries, placed, data=offset)
    (folder / "model.gguf").write_bytes(content[: len(content) - len(data)] + data)
    return read_gguf(folder / "model.gguf")


def test_llama(tmp_path: Path) -> None:
    keys = LLAMA | {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.bos_token_id": 99}
    assert model_config(make(tmp_path, "llama", keys)) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 10,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "pad_token_id": None,
        "dtype": "float32",
        "eos_token_id": 7,
        "quantization_config": {"quant_method": "gguf"},
    }


def test_biases_and_a_head_are_seen_by_their_tensors(tmp_path: Path) -> None:
    tensors = [("output.weight", (64, 10)), ("blk.0.attn_q.bias", (64,))]
    config = model_config(make(tmp_path, "llama", LLAMA, tensors))
    assert config["tie_word_embeddings"] is False
    assert config["attention_bias"] is True


def test_layers_that_only_draft_are_left_out(tmp_path: Path) -> None:
    keys = LLAMA | {"block_count": 3, "nextn_predict_layers": 1}
    assert model_config(make(tmp_path, "llama", keys))["num_hidden_layers"] == 2


def test_rope_freqs_are_divisors(tmp_path: Path) -> None:
    divisors = struct.pack("<8f", 1, 1, 1, 1.5, 2, 4, 8, 8)
    file = make(tmp_path, "llama", LLAMA, [("rope_freqs.weight", (8,))], divisors)
    config = model_config(file)
    factors = [1.0, 1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0]
    assert config["rope_scaling"] == {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
    }
    assert config["original_max_position_embeddings"] == 1024


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"factor": 2.0}),
        ({"rope.scale_linear": 2.0, "rope.scaling.factor": 4.0}, {"factor": 4.0}),
        ({"rope.scaling.factor": 4.0}, {"factor": 4.0}),
        ({"rope.scaling.factor": 0.0}, None),
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 256,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            {"factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling(keys: dict[str, Any], scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    found = model_config(make(tmp_path, "qwen2", LLAMA | keys)).get("rope_scaling")
    if found is not None:
        assert found.pop("rope_type") in ("linear", "yarn")
    assert found == scaling


def test_divisors_are_scaled_by_a_linear_factor(tmp_path: Path) -> None:
    keys = LLAMA | {"rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 1.25}
    data = struct.pack("<8f", 1, 1, 1, 1.5, 2, 4, 8, 8)
    file = make(tmp_path, "llama", keys, [("rope_freqs.weight", (8,))], data)
    scaling = model_config(file)["rope_scaling"]
    assert scaling["short_factor"] == [2.0, 2.0, 2.0, 3.0, 4.0, 8.0, 16.0, 16.0]
    assert scaling["attention_factor"] == 1.25


def test_a_factor_of_yarns_own_magnitude(tmp_path: Path) -> None:
    keys = LLAMA | {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    for more, expected in (
        ({}, None),
        ({"rope.scaling.attn_factor": 0.5}, 0.5 * (0.1 * math.log(4) + 1)),
        ({"rope.scaling.yarn_attn_factor": 1.5}, 1.5),
        ({"rope.scaling.yarn_attn_factor": 1.5, "rope.scaling.attn_factor": 2.0}, 3.0),
    ):
        found = model_config(make(tmp_path, "qwen2", keys | more))["rope_scaling"]
        assert found.get("attention_factor") == (expected and pytest.approx(expected))


WINDOWS = LLAMA | {
    "block_count": 4,
    "attention.sliding_window": 16,
    "expert_count": 2,
    "expert_used_count": 1,
    "expert_feed_forward_length": 32,
}


@pytest.mark.parametrize("architecture", ["gemma2", "gpt-oss"])
@pytest.mark.parametrize(
    ("pattern", "windows"),
    [
        (None, [True, False, True, False]),
        (3, [True, True, False, True]),
        (1, [False] * 4),
        (0, [True] * 4),
        ([False, True, True, True], [False, True, True, True]),
    ],
)
def test_which_layers_have_windows(
    architecture: str, pattern: int | list[bool] | None, windows: list[bool], tmp_path: Path
) -> None:
    keys = WINDOWS
    if pattern is not None:
        keys = keys | {"attention.sliding_window_pattern": pattern}
    types = model_config(make(tmp_path, architecture, keys))["layer_types"]
    assert [each == "sliding_attention" for each in types] == windows


def test_gemma_3(tmp_path: Path) -> None:
    keys = LLAMA | {"attention.key_length": 32, "attention.value_length": 32}
    whole = model_config(make(tmp_path, "gemma3", keys))
    assert whole["layer_types"] == ["full_attention"] * 2
    windows = keys | {
        "block_count": 3,
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": [True, False, True],
        "rope.freq_base_swa": 1e4,
    }
    config = model_config(make(tmp_path, "gemma3", windows))
    assert config["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert config["sliding_window"] == 16
    assert config["query_pre_attn_scalar"] == config["head_dim"] == 32


def test_the_largest_gemma_scales_queries_by_their_share_of_the_width(tmp_path: Path) -> None:
    keys = LLAMA | {"block_count": 46, "attention.key_length": 32, "attention.value_length": 32}
    assert model_config(make(tmp_path, "gemma2", keys))["query_pre_attn_scalar"] == 16


DEEPSEEK = LLAMA | {
    "attention.kv_lora_rank": 32,
    "attention.key_length": 24,
    "attention.value_length": 20,
    "rope.dimension_count": 8,
    "leading_dense_block_count": 1,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 48,
}


def test_older_files_of_deepseek_have_heads_as_checkpoints_do(tmp_path: Path) -> None:
    older = model_config(make(tmp_path, "deepseek2", DEEPSEEK))
    sizes = {"attention.key_length": 40, "attention.value_length": 32}
    own = {"attention.key_length_mla": 24, "attention.value_length_mla": 20}
    assert model_config(make(tmp_path, "deepseek2", DEEPSEEK | sizes | own)) == older
    assert (older["qk_nope_head_dim"], older["v_head_dim"], older["q_lora_rank"]) == (16, 20, None)
    assert older["architectures"] == ["DeepseekV2ForCausalLM"]


def test_how_deepseek_chooses_experts(tmp_path: Path) -> None:
    def architecture(tensors: Sequence[tuple[str, Sequence[int]]] = (), **more: Any) -> str:
        config = model_config(make(tmp_path, "deepseek2", DEEPSEEK | more, tensors))
        return str(config["architectures"][0])

    assert architecture([("blk.1.exp_probs_b.bias", (4,))]) == "DeepseekV3ForCausalLM"
    assert architecture(expert_gating_func=2) == "DeepseekV3ForCausalLM"
    assert architecture(expert_count=0) == "YoutuForCausalLM"
    with pytest.raises(UnsupportedModelError, match="chosen by function 3"):
        architecture(expert_gating_func=3)


BAMBA = LLAMA | {
    "attention.head_count_kv": [0, 2],
    "rope.dimension_count": 8,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 1,
    "ssm.time_step_rank": 8,
    "ssm.inner_size": 128,
}


def test_bamba_is_told_from_granite_by_heads_that_are_rotated_in_part(tmp_path: Path) -> None:
    config = model_config(make(tmp_path, "granitehybrid", BAMBA))
    assert config["architectures"] == ["BambaForCausalLM"]
    assert config["attn_layer_indices"] == [1]
    whole = BAMBA | {"rope.dimension_count": 16}
    config = model_config(make(tmp_path, "granitehybrid", whole))
    assert config["architectures"] == ["GraniteMoeHybridForCausalLM"]
    assert config["position_embedding_type"] == "rope"


def test_factors_of_0_are_those_of_llama_cpp_by_default(tmp_path: Path) -> None:
    names = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
    for keys in (LLAMA, LLAMA | dict.fromkeys(names, 0.0)):
        config = model_config(make(tmp_path, "granite", keys))
        assert config["attention_multiplier"] == 0.25
        for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
            assert config[name] == 1.0
    gated = DEEPSEEK | {"expert_gating_func": 2, "expert_weights_scale": 0.0}
    assert model_config(make(tmp_path, "deepseek2", gated))["routed_scaling_factor"] == 1.0


@pytest.mark.parametrize("rotated", [True, False])
def test_granite_with_experts_may_have_no_positions(rotated: bool, tmp_path: Path) -> None:
    keys = LLAMA | {"expert_count": 2, "expert_used_count": 1, "rope.scaling.finetuned": rotated}
    found = model_config(make(tmp_path, "granitemoe", keys))["position_embedding_type"]
    assert found == ("rope" if rotated else "nope")


def test_the_norms_of_older_files_of_nemotron(tmp_path: Path) -> None:
    own = {"attention.head_count_kv": [0, 2], "feed_forward_length": [96, 0]}
    keys = {name: value for name, value in (BAMBA | own).items() if "rms_epsilon" not in name}
    del keys["rope.dimension_count"]
    for more, epsilon in (
        ({}, 1e-5),
        ({"attention.layer_norm_epsilon": 1e-6}, 1e-6),
        ({"attention.layer_norm_epsilon": 1e-6, "attention.layer_norm_rms_epsilon": 2e-6}, 2e-6),
    ):
        config = model_config(make(tmp_path, "nemotron_h", keys | more))
        assert config["layer_norm_epsilon"] == epsilon


GEMMA4 = LLAMA | {
    "attention.key_length": 32,
    "attention.key_length_swa": 16,
    "attention.sliding_window": 16,
    "attention.sliding_window_pattern": [True, False],
    "attention.head_count_kv": [2, 1],
}


def test_gemma_4(tmp_path: Path) -> None:
    divisors = [1.0] * 4 + [1e30] * 12
    file = make(
        tmp_path, "gemma4", GEMMA4, [("rope_freqs.weight", (16,))], struct.pack("<16f", *divisors)
    )
    config = model_config(file)
    assert config["rope_parameters"]["full_attention"]["partial_rotary_factor"] == 0.25
    assert (config["num_key_value_heads"], config["num_global_key_value_heads"]) == (2, 1)
    assert (config["head_dim"], config["global_head_dim"]) == (16, 32)
    assert config["attention_k_eq_v"] is True
    assert config["use_double_wide_mlp"] is False
    wide = GEMMA4 | {"feed_forward_length": [96, 192], "attention.shared_kv_layers": 1}
    assert model_config(make(tmp_path, "gemma4", wide))["use_double_wide_mlp"] is True


@pytest.mark.parametrize(
    ("architecture", "keys", "error", "why"),
    [
        ("gemma4", GEMMA4 | {"feed_forward_length": [192, 96]}, UnsupportedModelError, "differ in"),
        (
            "gemma4",
            GEMMA4 | {"attention.value_length_swa": 8},
            UnsupportedModelError,
            "keys and values differ",
        ),
        (
            "gemma4",
            GEMMA4 | {"attention.value_length": 16},
            UnsupportedModelError,
            "keys and values differ",
        ),
        ("gemma4", GEMMA4 | {"rope.dimension_count_swa": 32}, ModelError, "32 rotated numbers"),
        (
            "deepseek2",
            DEEPSEEK | {"attention.temperature_scale": 0.1},
            UnsupportedModelError,
            "scaled queries",
        ),
        ("deepseek2", DEEPSEEK | {"rope.dimension_count": 24}, ModelError, "24 numbers of keys"),
        (
            "deepseek32",
            DEEPSEEK | {"expert_gating_func": 1},
            UnsupportedModelError,
            "without experts that are chosen by sigmoids",
        ),
        (
            "kimi-linear",
            DEEPSEEK | {"expert_gating_func": 1},
            UnsupportedModelError,
            "chosen by function 1",
        ),
        (
            "granitehybrid",
            BAMBA | {"embedding_scale": 2.0},
            UnsupportedModelError,
            "as Bamba's layers alone",
        ),
        (
            "granitehybrid",
            BAMBA | {"rope.dimension_count": 4},
            UnsupportedModelError,
            "as Bamba's layers alone",
        ),
        (
            "glm4",
            LLAMA | {"rope.dimension_sections": [2, 3, 3, 0]},
            UnsupportedModelError,
            "takes images",
        ),
        (
            "minimax-m2",
            LLAMA | {"expert_gating_func": 1},
            UnsupportedModelError,
            "chosen by function 1",
        ),
        (
            "lfm2moe",
            LLAMA | {"shortconv.l_cache": 3, "expert_count": 2, "expert_gating_func": 1},
            UnsupportedModelError,
            "chosen by function 1",
        ),
        ("lfm2", LLAMA | {"attention.sliding_window": 8}, UnsupportedModelError, "sliding window"),
        (
            "granite",
            LLAMA | {"rope.scaling.finetuned": False},
            UnsupportedModelError,
            "granite without rotary positions",
        ),
        ("llama", LLAMA | {"attention.causal": False}, UnsupportedModelError, "later ones"),
        (
            "qwen2",
            LLAMA | {"rope.dimension_count": 8},
            UnsupportedModelError,
            "8 rotated numbers of heads of 16",
        ),
        (
            "qwen2",
            LLAMA | {"rope.scaling.attn_factor": 1.5, "rope.scaling.factor": 2.0},
            UnsupportedModelError,
            "'linear' together with rope.scaling.attn_factor",
        ),
        (
            "gemma2",
            LLAMA | {"attention.sliding_window_pattern": [True]},
            ModelError,
            "sliding_window_pattern is not a switch for each layer",
        ),
        ("gemma2", LLAMA | {"attention.sliding_window_pattern": "x"}, ModelError, "pattern is 'x'"),
        ("llama", {"general.type": "adapter"}, UnsupportedModelError, "is a LoRA adapter"),
        ("", {"general.type": "imatrix"}, UnsupportedModelError, "statistics for quantizing"),
        ("clip", {"general.type": "mmproj"}, UnsupportedModelError, "encodes images"),
        (
            "mistral3",
            LLAMA | {"attention.temperature_scale": 0.1},
            ModelError,
            "scaled by position",
        ),
        ("clip", LLAMA, UnsupportedModelError, "encodes images"),
        ("rwkv7", LLAMA, UnsupportedModelError, "'rwkv7', which is not supported"),
        ("", LLAMA, UnsupportedModelError, "does not say which architecture"),
        ("llama", LLAMA | {"block_count": 0}, ModelError, "block_count is 0"),
        # Nothing is made for each layer or head of what a few bytes state.
        ("llama", LLAMA | {"block_count": (1 << 31) - 1}, ModelError, "block_count is 2147483647"),
        ("gptneox", LLAMA | {"attention.head_count": 1 << 30}, ModelError, "head_count is 10737"),
        ("llama", LLAMA | {"block_count": "many"}, ModelError, "block_count"),
        ("llama", LLAMA | {"rope.freq_base": "x"}, ModelError, "freq_base is 'x'"),
        ("llama", LLAMA | {"rope.freq_base": ""}, ModelError, "freq_base is ''"),
        ("llama", LLAMA | {"rope.scaling.factor": -2.0}, ModelError, r"factor is -2\.0"),
        (
            "llama",
            LLAMA | {"attention.layer_norm_rms_epsilon": -1.0},
            ModelError,
            r"layer_norm_rms_epsilon is -1\.0",
        ),
        ("llama", LLAMA | {"rope.freq_base": "x\ny"}, ModelError, r"freq_base is 'x\\ny'"),
        ("llama", {"block_count": 2}, ModelError, r"no llama\.feed_forward_length"),
        (
            "llama",
            LLAMA | {"attention.head_count_kv": [2, 1]},
            UnsupportedModelError,
            "layers that differ in llama.attention.head_count_kv",
        ),
        (
            "llama",
            LLAMA | {"attention.key_length": 16, "attention.value_length": 8},
            UnsupportedModelError,
            "keys and values differ",
        ),
        ("qwen2", LLAMA | {"rope.scaling.type": "longrope"}, UnsupportedModelError, "factors"),
        (
            "starcoder",
            LLAMA | {"attention.layer_norm_epsilon": 1e-5},
            UnsupportedModelError,
            "2 key",
        ),
    ],
)
def test_refusals(
    architecture: str, keys: dict[str, Any], error: type[ModelError], why: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=why):
        model_config(make(tmp_path, architecture, keys))


def test_divisors_beside_yarn_are_refused(tmp_path: Path) -> None:
    keys = LLAMA | {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}
    file = make(
        tmp_path, "llama", keys, [("rope_freqs.weight", (8,))], struct.pack("<8f", *[1.0] * 8)
    )
    with pytest.raises(UnsupportedModelError, match=r"'yarn' together with rope_freqs\.weight"):
        model_config(file)


def test_factors_of_angles_are_above_0(tmp_path: Path) -> None:
    tensors = [("rope_freqs.weight", (8,))]
    file = make(tmp_path, "llama", LLAMA, tensors, struct.pack("<8f", *[1.0] * 7, 0.0))
    with pytest.raises(CorruptFileError, match=r"rope_freqs\.weight has numbers that"):
        model_config(file)


def test_a_table_without_dimensions(tmp_path: Path) -> None:
    content = header([encoded("general.architecture", "llama")], [("token_embd.weight", (), 0, 0)])
    (tmp_path / "model.gguf").write_bytes(content + bytes(4))
    with pytest.raises(ModelError, match=r"token_embd.weight has the shape \[\]"):
        model_config(read_gguf(tmp_path / "model.gguf"))


def test_a_file_without_weights(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(header([encoded("general.architecture", "llama")]))
    with pytest.raises(ModelError, match="no tensor token_embd"):
        model_config(read_gguf(tmp_path / "model.gguf"))


def test_every_architecture_has_a_family_or_modules_of_transformers() -> None:
    others = {known[0] for known in ARCHITECTURES.values()} - FAMILIES.keys()
    assert others <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
