"""How families of models with images read config.json: positions on three axes, levels, spans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tgi_cli.errors import ModelError
from tgi_cli.models import read_config
from tgi_cli.models.registry import decoder_spec, model_facts
from tgi_cli.models.spec import AttentionSpec, DecoderSpec, MoESpec, RopeSpec

QWEN = {
    "Qwen2VLForConditionalGeneration": "Qwen2VLConfig",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2_5_VLConfig",
    "Qwen3VLForConditionalGeneration": "Qwen3VLConfig",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3VLMoeConfig",
}
SHARED = ("vocab_size", "hidden_size", "max_position_embeddings")


def read(folder: Path, architecture: str, **values: Any) -> DecoderSpec:
    raw = {"architectures": [architecture], "dtype": "float32", **values}
    (folder / "config.json").write_text(json.dumps(raw))
    return decoder_spec(read_config(folder))


def attentions(spec: DecoderSpec) -> list[AttentionSpec]:
    return [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]


def rope(spec: DecoderSpec) -> RopeSpec:
    (only,) = spec.ropes
    assert isinstance(only, RopeSpec)
    return only


@pytest.mark.parametrize("architecture", QWEN)
def test_absent_keys_mean_what_they_mean_to_transformers(architecture: str, tmp_path: Path) -> None:
    theirs = getattr(transformers, QWEN[architecture])()
    text = theirs.text_config
    spec = read(tmp_path, architecture)
    for name in SHARED:
        assert getattr(spec, name) == getattr(text, name), name
    first, angles = attentions(spec)[0], rope(spec)
    assert len(spec.layers) == text.num_hidden_layers
    assert first.num_heads == text.num_attention_heads
    assert first.num_kv_heads == text.num_key_value_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    assert first.head_dim == angles.dims == head_dim
    assert spec.final_norm.eps == text.rms_norm_eps
    assert angles.parameters["rope_theta"] == text.rope_parameters["rope_theta"]
    third = architecture.startswith("Qwen3")
    assert angles.parameters["mrope_section"] == ([24, 20, 20] if third else [16, 24, 24])
    assert angles.parameters["mrope_interleaved"] == third
    assert spec.deepstack == (len(theirs.vision_config.deepstack_visual_indexes) if third else 0)
    assert not spec.tie_word_embeddings
    mlp = spec.layers[0].mlp
    assert isinstance(mlp, MoESpec) == ("Moe" in architecture)
    if isinstance(mlp, MoESpec):
        assert (mlp.num_experts, mlp.top_k) == (text.num_local_experts, text.num_experts_per_tok)
        assert mlp.intermediate_size == text.moe_intermediate_size
        assert mlp.normalize


def test_older_files_of_qwen_have_the_decoder_s_fields_at_the_top(tmp_path: Path) -> None:
    spec = read(
        tmp_path,
        "Qwen2_5_VLForConditionalGeneration",
        hidden_size=2048,
        num_attention_heads=16,
        num_key_value_heads=2,
        num_hidden_layers=3,
        rope_theta=1e5,
        tie_word_embeddings=True,
        rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
        use_sliding_window=True,
        sliding_window=100,
        max_window_layers=1,
    )
    assert spec.hidden_size == 2048
    assert spec.tie_word_embeddings
    assert rope(spec).parameters["rope_theta"] == 1e5
    assert [each.window for each in attentions(spec)] == [None, 100, 100]


@pytest.mark.parametrize("architecture", QWEN)
def test_embeddings_are_tied_where_transformers_ties_them(
    architecture: str, tmp_path: Path
) -> None:
    tied = {"tie_word_embeddings": True}
    assert read(tmp_path, architecture, text_config={}, **tied).tie_word_embeddings
    inner = read(tmp_path, architecture, text_config=tied)
    assert inner.tie_word_embeddings == architecture.startswith("Qwen2")


def test_levels_that_are_no_list_are_an_error_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="makes no sense"):
        read(
            tmp_path,
            "Qwen3VLForConditionalGeneration",
            vision_config={"deepstack_visual_indexes": 3},
        )


def test_qwen_3_5_has_three_axes_that_alternate(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 4, "rope_parameters": {"mrope_section": [12, 10, 10]}}
    spec = read(tmp_path, "Qwen3_5ForConditionalGeneration", text_config=text)
    assert rope(spec).parameters["mrope_section"] == [12, 10, 10]
    assert rope(spec).parameters["mrope_interleaved"]
    assert spec.deepstack == 0
    plain = read(tmp_path, "Qwen3NextForCausalLM", num_hidden_layers=4)
    assert "mrope_section" not in rope(plain).parameters


def test_tokens_of_gemma_s_images_see_each_other(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 6}
    third = read(tmp_path, "Gemma3ForConditionalGeneration", text_config=text)
    assert {each.spans for each in attentions(third)} == {"window"}
    alone = read(tmp_path, "Gemma3ForCausalLM", **text)
    assert {each.spans for each in attentions(alone)} == {"none"}
    for stated, wanted in (("vision", {"window", "none"}), (None, {"none"})):
        values = text | {"use_bidirectional_attention": stated}
        fourth = read(tmp_path, "Gemma4ForConditionalGeneration", text_config=values)
        assert {each.spans for each in attentions(fourth)} == wanted
        for each in attentions(fourth):
            assert each.window is not None or each.spans == "none"


def test_prompts_are_causal_unless_a_model_is_known_otherwise(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Gemma3ForCausalLM"], "dtype": "float32"})
    )
    assert not model_facts(read_config(tmp_path)).whole_prompts
