"""The choice of files, by name alone."""

from __future__ import annotations

import pytest

from tgi_cli.hub.model_files import is_adapter, select_adapter_files, select_files


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (["model.safetensors", "consolidated.safetensors"], ["model.safetensors"]),
        (["consolidated.safetensors"], ["consolidated.safetensors"]),
        (["model.safetensors", "model.fp16.safetensors"], ["model.safetensors"]),
        (["model.fp16.safetensors"], ["model.fp16.safetensors"]),
        (
            [
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model-00001-of-00002.fp16.safetensors",
                "consolidated-00001-of-00001.safetensors",
            ],
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ),
        (["model.safetensors", "model-00001-of-00001.safetensors"], ["model.safetensors"]),
        (["training_model.safetensors", "args.safetensors", "sub/model.safetensors"], []),
        (["model.safetensors", "adapter_model.safetensors"], ["model.safetensors"]),
        (["gptq_model-4bit-128g.safetensors"], ["gptq_model-4bit-128g.safetensors"]),
    ],
)
def test_only_one_copy_of_the_weights_is_selected(names: list[str], taken: list[str]) -> None:
    assert list(select_files(names, ".safetensors", False).weights) == taken


def test_files_for_serving_are_selected() -> None:
    needed = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        "source.spm",
        "chat_template.jinja",
        "chat_template.json",
        "additional_chat_templates/tools.jinja",
        "preprocessor_config.json",
        "processor_config.json",
        "model.safetensors.index.json",
    }
    other = {
        "README.md",
        ".gitattributes",
        "pytorch_model.bin.index.json",
        "original/params.json",
        "original/tokenizer.model",
        "flax_model.msgpack",
        "code.py",
        "trainer_state.json",
    }
    chosen = select_files(needed | other, ".safetensors", False)
    assert set(chosen.small) == needed
    assert set(chosen.skipped) == other
    assert all(chosen.skipped.values())


def test_adapters() -> None:
    names = ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md"]
    assert is_adapter(names)
    assert not is_adapter([*names, "model.safetensors"])
    assert select_adapter_files([*names, "adapter_model.bin"]).weights == (
        "adapter_model.safetensors",
    )
    assert select_adapter_files(names).small == ("adapter_config.json", "tokenizer.json")
