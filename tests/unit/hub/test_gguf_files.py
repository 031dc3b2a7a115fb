"""Which GGUF files a tag names."""

from __future__ import annotations

import pytest

from tgi_cli.errors import CheckpointError, ModelError, ModelNotFoundError
from tgi_cli.hub.gguf_files import (
    choose_variant,
    gguf_variants,
    image_encoders,
    is_model_file,
    split_tag,
)

NAMES = (
    "README.md",
    "Qwen3-8B-Q4_K_M.gguf",
    "Qwen3-8B-UD-Q4_K_XL.gguf",
    "Qwen3-8B-IQ4_XS.gguf",
    "Qwen3-8B-Q8_0.gguf",
    "BF16/Qwen3-8B-BF16-00001-of-00002.gguf",
    "BF16/Qwen3-8B-BF16-00002-of-00002.gguf",
    "mmproj-F16.gguf",
    "imatrix_unsloth.gguf",
    "mtp-Qwen3-8B-Q8_0.gguf",
)


def chosen(tag: str | None, names: tuple[str, ...] = NAMES) -> tuple[str, ...]:
    return choose_variant("org/m", names, tag, lambda name: 1_500_000_000).names


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("org/m", ("org/m", None)),
        ("org/m:Q4_K_M", ("org/m", "Q4_K_M")),
        ("hf.co/org/m:q8_0", ("org/m", "q8_0")),
        ("huggingface.co/org/m", ("org/m", None)),
        ("https://huggingface.co/org/m:Q4_0", ("org/m", "Q4_0")),
        ("org/m:BF16/model.gguf", ("org/m", "BF16/model.gguf")),
        ("org/m/BF16/model.gguf", ("org/m", "BF16/model.gguf")),
        ("org/m.gguf", ("org/m.gguf", None)),
    ],
)
def test_ids_and_tags_are_split(named: str, expected: tuple[str, str | None]) -> None:
    assert split_tag(named) == expected


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        (None, "Qwen3-8B-Q4_K_M.gguf"),
        ("latest", "Qwen3-8B-Q4_K_M.gguf"),
        ("q4_k_m", "Qwen3-8B-Q4_K_M.gguf"),
        ("Q4_K_XL", "Qwen3-8B-UD-Q4_K_XL.gguf"),
        ("ud-q4_k_xl", "Qwen3-8B-UD-Q4_K_XL.gguf"),
        ("IQ4_XS", "Qwen3-8B-IQ4_XS.gguf"),
        ("Q8_0", "Qwen3-8B-Q8_0.gguf"),
        ("Qwen3-8B-Q8_0.gguf", "Qwen3-8B-Q8_0.gguf"),
        ("Qwen3-8B-Q8_0", "Qwen3-8B-Q8_0.gguf"),
        ("BF16", "BF16/Qwen3-8B-BF16-00001-of-00002.gguf"),
        ("Qwen3-8B-BF16-00001-of-00002.gguf", "BF16/Qwen3-8B-BF16-00001-of-00002.gguf"),
    ],
)
def test_a_tag_names_one_model(tag: str | None, name: str) -> None:
    names = chosen(tag)
    assert names[0] == name
    assert len(names) == (2 if "BF16" in name else 1)


@pytest.mark.parametrize("tag", ["Q4_K", "4_K_M", "Q5_K_M", "F16", ""])
def test_a_miss_lists_the_tags_with_their_sizes(tag: str) -> None:
    with pytest.raises(ModelNotFoundError, match=rf"org/m has no GGUF file for '{tag}'") as caught:
        chosen(tag)
    assert caught.value.remedy == (
        "name one of BF16 (3.0 GB), IQ4_XS (1.5 GB), Q4_K_M (1.5 GB), Q8_0 (1.5 GB), "
        "UD-Q4_K_XL (1.5 GB)"
    )


def test_without_the_usual_ones_the_first_is_taken() -> None:
    assert chosen(None, ("b-Q6_K.gguf", "a-Q5_K_S.gguf")) == ("a-Q5_K_S.gguf",)
    assert chosen(None, ("b-Q8_0.gguf", "a-Q5_K_S.gguf")) == ("b-Q8_0.gguf",)


def test_files_without_a_quantization_go_by_their_names() -> None:
    (variant,) = gguf_variants(["folder/my-model.gguf"])
    assert (variant.tag, variant.names) == ("my-model", ("folder/my-model.gguf",))


def test_several_models_of_a_quantization_are_not_guessed_at() -> None:
    names = ("small-Q4_0.gguf", "large-Q4_0.gguf", "more/large-Q4_0.gguf")
    with pytest.raises(ModelError, match="2 GGUF models for 'Q4_0'") as caught:
        chosen("Q4_0", names)
    assert "large-Q4_0.gguf, small-Q4_0.gguf" in caught.value.remedy
    assert chosen("small-Q4_0.gguf", names) == ("small-Q4_0.gguf",)


def test_missing_parts_are_named() -> None:
    names = ("m-Q4_0-00001-of-00003.gguf", "m-Q4_0-00003-of-00003.gguf")
    with pytest.raises(CheckpointError, match=r"org/m lacks m-Q4_0-00002-of-00003\.gguf"):
        chosen("Q4_0", names)


def test_a_name_that_claims_very_many_parts_is_that_of_a_file() -> None:
    (variant,) = gguf_variants(["m-Q4_0-00001-of-99999.gguf"])
    assert variant.missing == ()


def test_nothing_to_choose_from_is_not_found() -> None:
    with pytest.raises(ModelNotFoundError, match="no GGUF files with a language model"):
        chosen(None, ("mmproj-F16.gguf", "README.md"))


def test_image_encoders_statistics_and_drafters_are_no_models() -> None:
    assert [name for name in NAMES if is_model_file(name)] == list(NAMES[1:7])
    assert image_encoders(NAMES) == ["mmproj-F16.gguf"]
