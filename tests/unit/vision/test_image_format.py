"""How prompts write images: formats of checkpoints, expansion, and what templates render."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.tools.image_models import IMAGE_MODELS, write_image_model
from tests.unit.text import tiny
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.text.bundle import TextBundle
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.vision.image_format import ImageFormat, expand, renders_images
from tgi_cli.vision.images import ImageError, PromptPiece
from tgi_cli.vision.model_formats import MODEL_TYPES, image_format

PLAIN = ImageFormat(
    family="llava", placeholder="<i>", text="<i>", row_token="<i>", placeholder_id=7
)


def tokens(text: str) -> list[int]:
    """The placeholder has the id 7, each other character that of its code."""
    return [7 if part == "\0" else ord(part) for part in text.replace("<i>", "\0")]


def test_each_run_becomes_as_many_ids_as_it_has_rows() -> None:
    first = (
        PromptPiece("["),
        PromptPiece("<i>", 3),
        PromptPiece("|"),
        PromptPiece("<i>", 2),
        PromptPiece("]"),
    )
    second = (PromptPiece("<i>", 1),)
    ids, spans = expand("a<i>b<i>", [first, second], PLAIN, tokens)
    a, b, left, bar, right = (ord(letter) for letter in "ab[|]")
    assert ids == [a, left, 7, 7, 7, bar, 7, 7, right, b, 7]
    assert spans == (((2, 3), (6, 2)), ((10, 1),))


def test_one_token_of_a_run_is_tokenized() -> None:
    seen = []

    def tokenize(text: str) -> list[int]:
        seen.append(text)
        return tokens(text)

    expand("a<i>b", [(PromptPiece("<i>", 100_000),)], PLAIN, tokenize)
    assert seen == ["a<i>b"]


@pytest.mark.parametrize(
    ("text", "images"), [("no place", 1), ("<i><i>", 1), ("<i>", 2), ("<i>", 0)]
)
def test_placeholders_must_be_as_many_as_images(text: str, images: int) -> None:
    with pytest.raises(ImageError, match=rf"the request has {images} images"):
        expand(text, [(PromptPiece("<i>", 1),)] * images, PLAIN, tokens)


def test_rows_that_a_client_has_typed_are_refused() -> None:
    gemma = ImageFormat(
        family="gemma3", placeholder="<p>", text="<p>", row_token="<i>", placeholder_id=7
    )
    with pytest.raises(ImageError, match="contains the token that stands for images"):
        expand("<p> and <i>", [(PromptPiece("<i>", 2),)], gemma, tokens)


def test_a_prompt_without_images_stays_as_it_is() -> None:
    assert expand("words", [], PLAIN, tokens) == ([ord(letter) for letter in "words"], ())
    ended = ImageFormat(
        family="paligemma",
        placeholder="<i>",
        text="<i>",
        row_token="<i>",
        placeholder_id=7,
        behind_images="B",
        at_end="E",
    )
    assert ended.write("words", []) == "words"
    assert ended.write("a<i>b<i>c", [(PromptPiece("<i>", 1),)] * 2) == "a<i>b<i>BcE"


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_checkpoints_tell_their_tokens(name: str, tmp_path: Path) -> None:
    model = IMAGE_MODELS[name]
    folder = write_image_model(name, tmp_path)
    tokenizer = Tokenizer.load(folder)
    found = image_format(folder, tokenizer)
    assert found.row_token == model.tokens[0]
    assert found.placeholder_id == tokenizer.backend.token_to_id(model.tokens[0])
    assert found.text == model.written.rstrip("\n")
    assert json.loads(json.dumps(found.family)) == found.family


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_templates_write_one_placeholder_for_an_image(name: str, tmp_path: Path) -> None:
    folder = write_image_model(name, tmp_path)
    bundle = TextBundle.load(folder)
    template = bundle.chat_template
    assert template is not None
    with closing(template):
        found = image_format(folder, bundle.tokenizer)
        assert renders_images(template, found)
        parts = [{"type": "text", "text": "see "}, {"type": "image"}]
        text = template.render([{"role": "user", "content": parts}])
        assert text == f"<user>see {IMAGE_MODELS[name].written}\n<assistant>"


@pytest.mark.parametrize(
    "template",
    [
        tiny.CHAT_TEMPLATE,
        "{{ messages[0].content + '' }}",
        "{% for part in messages[0].content %}{{ part.text }}{% endfor %}",
        "<image><image>{{ messages[0].content[1].text }}",
    ],
)
def test_templates_that_do_not_write_one_are_told(template: str, tmp_path: Path) -> None:
    folder = write_image_model("LLaVA 1.5", tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    bundle = TextBundle.load(folder)
    assert bundle.chat_template is not None
    with closing(bundle.chat_template):
        found = image_format(folder, bundle.tokenizer)
        assert not renders_images(bundle.chat_template, found)


def folder_of(path: Path, config: dict[str, Any], name: str = "LLaVA 1.5") -> Path:
    folder = write_image_model(name, path)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_other_models_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"model_type": "llama"})
    why = "models of the type `llama` have no supported image encoder"
    with pytest.raises(UnsupportedModelError, match=why) as refused:
        image_format(folder, Tokenizer.load(folder))
    assert refused.value.cause.startswith("this model takes no images: ")
    assert "llama" not in MODEL_TYPES


def test_other_encoders_of_llava_are_refused(tmp_path: Path) -> None:
    config = {"model_type": "llava", "vision_config": {"model_type": "dinov2"}}
    folder = folder_of(tmp_path, config)
    with pytest.raises(UnsupportedModelError, match="encoders of the type `dinov2`"):
        image_format(folder, Tokenizer.load(folder))


def test_a_folder_without_a_processor_is_refused(tmp_path: Path) -> None:
    folder = write_image_model("Qwen2-VL", tmp_path)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(UnsupportedModelError, match=r"has no preprocessor_config\.json"):
        image_format(folder, Tokenizer.load(folder))


def test_a_tokenizer_without_the_token_is_refused(tmp_path: Path) -> None:
    folder = write_image_model("Qwen2-VL", tmp_path)
    tiny.byte_level().save(str(folder / "tokenizer.json"))
    with pytest.raises(UnsupportedModelError, match="has no token for images"):
        image_format(folder, Tokenizer.load(folder))
