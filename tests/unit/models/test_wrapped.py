"""Decoders of built-in families within models that take images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tgi_cli.models.config import ModelConfig, read_config
from tgi_cli.models.registry import decoder_spec, is_builtin, model_facts
from tgi_cli.models.spec import AttentionSpec


def written(path: Path, architecture: str, *tensors: str, **raw: Any) -> ModelConfig:
    """A checkpoint's configuration beside tensors of these names."""
    path.mkdir(exist_ok=True)
    stated = {"architectures": [architecture], "dtype": "bfloat16"} | raw
    (path / "config.json").write_text(json.dumps(stated))
    if tensors:
        empty = {name: torch.zeros(64, 64) for name in tensors}
        save_file(empty, path / "model.safetensors", metadata={"format": "pt"})
    return read_config(path)


LLAVA_TEXT = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}
"""All that LLaVA 1.5 says of its decoder, beside what is that of Llama's class."""


def test_sizes_that_a_text_part_leaves_out_are_those_of_its_class(tmp_path: Path) -> None:
    llava = written(tmp_path, "LlavaForConditionalGeneration", text_config=LLAVA_TEXT)
    assert is_builtin(llava)
    spec = decoder_spec(llava)
    assert (spec.hidden_size, len(spec.layers), spec.vocab_size) == (4096, 32, 32064)
    facts = model_facts(llava)
    assert facts.takes_images
    assert facts.max_position_embeddings == 4096


def test_a_mistral_has_the_sizes_of_its_own_class(tmp_path: Path) -> None:
    text = {"model_type": "mistral", "sliding_window": None, "head_dim": 128, "hidden_size": 5120}
    spec = decoder_spec(written(tmp_path, "LlavaForConditionalGeneration", text_config=text))
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.window) == (32, 8, None)


@pytest.mark.parametrize(
    ("architecture", "outer", "inner", "tied"),
    [
        ("LlavaForConditionalGeneration", None, None, False),
        ("LlavaForConditionalGeneration", None, True, True),
        ("LlavaForConditionalGeneration", True, None, True),
        ("LlavaNextForConditionalGeneration", None, True, False),
        ("InternVLForConditionalGeneration", None, None, True),
        ("InternVLForConditionalGeneration", False, True, False),
        ("Mistral3ForConditionalGeneration", None, False, True),
        ("Idefics3ForConditionalGeneration", None, True, False),
    ],
)
def test_embeddings_are_tied_as_transformers_ties_them(
    architecture: str, outer: bool | None, inner: bool | None, tied: bool, tmp_path: Path
) -> None:
    text: dict[str, Any] = {"model_type": "llama"}
    raw: dict[str, Any] = {"text_config": text}
    if inner is not None:
        text["tie_word_embeddings"] = inner
    if outer is not None:
        raw["tie_word_embeddings"] = outer
    assert decoder_spec(written(tmp_path, architecture, **raw)).tie_word_embeddings == tied


@pytest.mark.parametrize(
    ("architecture", "tensor", "builtin"),
    [
        ("LlavaForConditionalGeneration", "model.language_model.embed_tokens.weight", True),
        ("LlavaForConditionalGeneration", "language_model.model.embed_tokens.weight", True),
        ("LlavaForConditionalGeneration", "model.decoder.embed_tokens.weight", False),
        ("Idefics3ForConditionalGeneration", "model.text_model.embed_tokens.weight", True),
        ("SmolVLMForConditionalGeneration", "model.language_model.embed_tokens.weight", False),
    ],
)
def test_checkpoints_with_names_that_are_not_known_are_left_to_transformers(
    architecture: str, tensor: str, builtin: bool, tmp_path: Path
) -> None:
    assert is_builtin(written(tmp_path, architecture, tensor, text_config=LLAVA_TEXT)) == builtin


def test_decoders_of_other_families_are_left_to_transformers(tmp_path: Path) -> None:
    for text in ({"model_type": "cohere2"}, {"model_type": 7}, None):
        raw = {} if text is None else {"text_config": text}
        config = written(tmp_path, "LlavaForConditionalGeneration", **raw)
        assert not is_builtin(config)


def test_tensors_are_found_below_the_decoder(tmp_path: Path) -> None:
    text = LLAVA_TEXT | {"num_hidden_layers": 2}
    config = written(tmp_path, "SmolVLMForConditionalGeneration", text_config=text)
    source = decoder_spec(config).source
    for ours, theirs in {
        "model.embed_tokens.weight": "model.text_model.embed_tokens.weight",
        "model.layers.1.mlp_norm.weight": (
            "model.text_model.layers.1.post_attention_layernorm.weight"
        ),
        "model.norm.weight": "model.text_model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }.items():
        assert source(ours).names == (theirs,)
