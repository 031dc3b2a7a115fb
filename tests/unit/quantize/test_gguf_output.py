"""``tgi quantize --format gguf``: the file says what the checkpoint said."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.tools.gguf_models import demo_metadata, metadata_file, spm_metadata
from tests.tools.hub_server import HubServer
from tgi_cli import demo
from tgi_cli.errors import ConfigError, ModelError, UnsupportedModelError
from tgi_cli.gguf.reader import read_gguf
from tgi_cli.gguf.tokenizer import read_tokenizer
from tgi_cli.hub.resolve import resolve_model
from tgi_cli.models.checkpoint import read_headers, read_tensor
from tgi_cli.process.progress import ProgressReporter
from tgi_cli.quantize.gguf_blocks import q4_0, q8_0
from tgi_cli.quantize.gguf_names import GGUFLayout
from tgi_cli.quantize.gguf_output import check_options, output_path, quantize_to_gguf
from tgi_cli.quantize.gguf_tokenizer import tokenizer_metadata
from tgi_cli.quantize.options import QuantizeOptions
from tgi_cli.text.tokenizer import Tokenizer

SILENT = ProgressReporter(show_bar=False, log_interval=None)


def options(out: Path, **more: Any) -> QuantizeOptions:
    return QuantizeOptions(model_id="org/demo", output_dir=out, format="gguf", **more)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.parametrize(("encode", "kind"), [(q8_0, "Q8_0"), (q4_0, "Q4_0")])
def test_blocks_are_ggmls(encode: Any, kind: str) -> None:
    numbers = np.random.default_rng(0).standard_normal((64, 256), np.float32)
    numbers[0] = 0
    numbers[1, :32] = np.arange(32) - 16.0
    numbers[2, 32:64] = 3.0
    numbers[3] *= 1e-9
    expected = gguf.quantize(numbers, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(encode(torch.from_numpy(numbers)).flatten(1).numpy(), expected)


@pytest.mark.parametrize(("bits", "kind"), [(None, "Q4_0"), (8, "Q8_0")])
def test_a_written_model_is_read_as_it_was(tmp_path: Path, bits: int | None, kind: str) -> None:
    out = tmp_path / "out"
    result = quantize_to_gguf(demo.model_path(), options(out, bits=bits), SILENT)
    assert result.path == out / f"out-{kind}.gguf"
    assert [path.name for path in out.iterdir()] == [result.path.name]
    file = read_gguf(result.path)
    assert {tensor.type.name for tensor in file.tensors.values()} == {"F32", kind, "Q8_0"}
    assert file.tensors["token_embd.weight"].type.name == "Q8_0"

    served = resolve_model(str(result.path)).path
    original, found = (
        json.loads((folder / "config.json").read_text()) for folder in (demo.model_path(), served)
    )
    for name in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps"):
        assert found[name] == original[name]
    before, after = (Tokenizer.load(folder) for folder in (demo.model_path(), served))
    text = "Hello <|im_start|>user\n it's 1234 ünï  x"
    assert after.encode(text) == before.encode(text)
    assert (after.bos_token, after.eos_token) == (before.bos_token, before.eos_token)


def test_what_is_not_quantized_keeps_its_bits_and_its_place(tmp_path: Path) -> None:
    path = tmp_path / "plain.gguf"
    result = quantize_to_gguf(demo.model_path(), options(path, exclude=("*",)), SILENT)
    assert result.path == path
    assert not result.layers
    written = read_headers(resolve_model(str(path)).path)
    original = read_headers(demo.model_path())
    assert set(written) == set(original)
    for name, stored in original.items():
        expected = read_tensor(stored)
        found = written[name]
        assert found.read is not None
        tensor = found.read(*map(read_tensor, found.parts))
        assert isinstance(tensor, torch.Tensor)
        assert torch.equal(tensor.to(expected.dtype), expected), name


def test_the_same_options_give_the_same_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}" / "m.gguf" for number in range(2)]
    for path in paths:
        quantize_to_gguf(demo.model_path(), options(path), SILENT)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    with pytest.raises(ConfigError, match="exists"):
        output_path(options(paths[0]), "Q4_0")


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"method": "gptq"}, "--method gptq"),
        ({"bits": 3}, "no 3 bits"),
        ({"group_size": 128}, "32 inputs"),
        ({"sym": False}, "--asym"),
        ({"evaluate": True}, "--evaluate"),
        ({"resume": True}, "--resume"),
        ({"backend": "gptqmodel"}, "--backend gptqmodel"),
    ],
)
def test_options_without_an_effect_are_refused(more: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_options(options(Path("out"), **more))


def test_patterns_select_layers(tmp_path: Path) -> None:
    only = options(tmp_path / "m.gguf", include=("*.down_proj",))
    result = quantize_to_gguf(demo.model_path(), only, SILENT)
    assert {layer.name.rpartition(".")[2] for layer in result.layers} == {"down_proj"}
    wrong = replace(only, output_dir=tmp_path / "n.gguf", exclude=("nothing",))
    with pytest.raises(ConfigError, match="matches no layer"):
        quantize_to_gguf(demo.model_path(), wrong, SILENT)
    assert not (tmp_path / "n.gguf").exists()


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "max_position_embeddings": 131072,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 1000,
}


def test_llama_3_scales_its_frequencies_by_a_tensor() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(**LLAMA, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(torch.arange(0, 64, 2) / 64)
    [(name, divisors)] = GGUFLayout(LLAMA | {"rope_parameters": rope}).rope_tensors().items()
    assert name == "rope_freqs.weight"
    torch.testing.assert_close(divisors, plain / scaled)
    assert GGUFLayout(LLAMA).rope_tensors() == {}


def keys_of(architecture: str, **more: Any) -> dict[str, Any]:
    """The keys of a model that has no other files, without the architecture's name."""
    layout = GGUFLayout(LLAMA | {"architectures": [architecture]} | more)
    return {name.partition(".")[2]: value for name, value in layout.keys().items()}


def test_options_of_yarn() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
    plain = keys_of("Qwen3ForCausalLM", rope_parameters=yarn)
    assert not [name for name in plain if "yarn_" in name or "attn_factor" in name]
    own = 0.1 * math.log(4) + 1
    for more, magnitude in (
        ({"attention_factor": 1.0}, 1 / own),
        ({"mscale": 1.0, "mscale_all_dim": 2.0}, 1 / (0.2 * math.log(4) + 1)),
    ):
        rope = yarn | more | {"beta_fast": 16, "beta_slow": None}
        found = keys_of("Qwen3ForCausalLM", rope_parameters=rope)
        assert found["rope.scaling.attn_factor"] == pytest.approx(magnitude)
        assert found["rope.scaling.yarn_beta_fast"] == 16.0
        assert "rope.scaling.yarn_beta_slow" not in found


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_the_magnitude_of_long_texts_is_stated(kind: str) -> None:
    rope = {"type": kind, "long_factor": [2.0] * 32, "short_factor": [1.0] * 32}
    more = {"rope_scaling": rope, "original_max_position_embeddings": 4096}
    found = keys_of("Phi3ForCausalLM", **more)
    magnitude = math.sqrt(1 + math.log(32) / math.log(4096))
    assert found["rope.scaling.attn_factor"] == pytest.approx(magnitude)
    assert found["rope.scaling.original_context_length"] == 4096
    layout = GGUFLayout(LLAMA | {"architectures": ["Phi3ForCausalLM"]} | more)
    assert layout.rope_tensors().keys() == {"rope_factors_long.weight", "rope_factors_short.weight"}


def test_factors_of_granite_that_files_must_state() -> None:
    """Their defaults are 1, and llama.cpp's are none or others."""
    found = keys_of("GraniteForCausalLM", residual_multiplier=0.5)
    names = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
    assert [found[name] for name in names] == [1.0, 1.0, 0.5, 1.0]


def test_windows_of_gemma_by_a_number_or_a_list() -> None:
    name = "attention.sliding_window_pattern"
    more = {"sliding_window": 16, "query_pre_attn_scalar": 64}
    assert keys_of("Gemma3ForCausalLM", sliding_window_pattern=5, **more)[name] == 5
    types = ["full_attention", "sliding_attention"]
    for architecture in ("Gemma2ForCausalLM", "Gemma3ForCausalLM"):
        assert keys_of(architecture, layer_types=types, **more)[name] == [False, True]


def test_what_config_json_leaves_out_is_named() -> None:
    raw = {name: value for name, value in LLAMA.items() if name != "rms_norm_eps"}
    with pytest.raises(ModelError, match=r"config\.json has no 'rms_norm_eps'"):
        GGUFLayout(raw)


def test_nothing_is_left_of_a_file_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, *_: Any) -> None:
        path.write_bytes(b"GGUF")
        raise OSError("No space left on device")

    monkeypatch.setattr("tgi_cli.quantize.gguf_output.write_gguf", fail)
    with pytest.raises(OSError, match="No space left"):
        quantize_to_gguf(demo.model_path(), options(tmp_path / "out"), SILENT)
    assert not [*(tmp_path / "out").iterdir()]


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}},
            "truncate off has no GGUF key",
        ),
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM cannot be written"),
        ({"sliding_window": 4096}, "sliding window"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' have no GGUF key"),
        (
            {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 24},
            "query_pre_attn_scalar 24",
        ),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]}, "every fourth"),
    ],
)
def test_models_without_a_form_are_refused(more: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UnsupportedModelError, match=complaint):
        GGUFLayout(LLAMA | more)
    with pytest.raises(UnsupportedModelError, match="no name in GGUF"):
        GGUFLayout(LLAMA).name("model.layers.0.mlp.router.weight")


@pytest.mark.parametrize(
    "name", ["llama-bpe", "qwen2", "tekken", "gpt-4o", "gpt-2", "smollm", "falcon", "deepseek-v3"]
)
def test_pre_tokenizers_get_llama_cpps_names(tmp_path: Path, name: str) -> None:
    made = read_tokenizer(metadata_file(tmp_path / "v.gguf", demo_metadata(pre=name)))
    folder = tmp_path / "model"
    shutil.copytree(demo.model_path(), folder)
    made.save(str(folder / "tokenizer.json"))
    assert tokenizer_metadata(folder, 4096)["tokenizer.ggml.pre"] == name


def test_sentencepiece_vocabularies_get_scores(tmp_path: Path) -> None:
    metadata = spm_metadata()
    made = read_tokenizer(metadata_file(tmp_path / "v.gguf", metadata))
    made.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text("{}")
    found = tokenizer_metadata(tmp_path, 320)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    padding = [f"[PAD{index}]" for index in range(len(tokens), 320)]
    assert found["tokenizer.ggml.tokens"] == [*tokens, *padding]
    assert found["tokenizer.ggml.add_bos_token"] is True
    assert found["tokenizer.ggml.eos_token_id"] == 2


def test_tokenizers_without_a_form_are_refused(tmp_path: Path) -> None:
    content = json.loads((demo.model_path() / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}
    content["pre_tokenizer"]["trim_offsets"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match=r"llama\.cpp has no name"):
        tokenizer_metadata(tmp_path, 4096)
    with pytest.raises(UnsupportedModelError, match="the embedding 100"):
        tokenizer_metadata(tmp_path, 100)


def test_the_stand_in_serves_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "demo-Q8_0.gguf"
    quantize_to_gguf(demo.model_path(), options(path, bits=8), SILENT)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with HubServer() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.add("org/demo", {path.name: path.read_bytes()})
        assert (resolve_model("org/demo:Q8_0").path / path.name).is_file()
