"""Whether a server gives a model images, and if not, why."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.model_server.fakes import INFO
from tests.unit.text import tiny
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.vision.limits import ImageLimits
from tgi_cli.vision.load import Vision, load_vision

NO_LIMITS = ImageLimits()
LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "vision_config": {},
    "image_token_index": 1,
}
SEES = replace(INFO, vision=True, max_image_rows=16)


def loaded(
    folder: Path, info: Any = SEES, limits: ImageLimits = NO_LIMITS, **config: Any
) -> Vision:
    tiny.write_model(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return load_vision(folder, Tokenizer.load(folder), limits, info)


def test_a_model_of_text_has_no_images_and_no_reason(tmp_path: Path) -> None:
    found = loaded(tmp_path, model_type="llama")
    assert found.reader is None
    assert not found.reason
    assert not found.expected


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (NO_LIMITS, False),
        (ImageLimits(media_fetch=True), True),
        (ImageLimits(allowed_media_domains=("a.example",)), True),
        (ImageLimits(allowed_local_media_path=Path("/")), True),
    ],
)
def test_settings_without_effect_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, limits: ImageLimits, told: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        loaded(tmp_path, limits=limits, model_type="llama")
    assert ("the settings of images have no effect" in caplog.text) is told


def test_a_model_whose_images_are_not_supported_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = loaded(tmp_path, architectures=["MllamaForConditionalGeneration"])
    assert found.reader is None
    assert found.expected
    assert "decoder attends to images" in found.reason
    assert not found.reason.startswith("this model takes no images")
    assert "this model takes no images: its decoder" in caplog.text


def test_a_new_model_for_images_says_that_they_are_not_implemented(tmp_path: Path) -> None:
    found = loaded(tmp_path, architectures=["NewModel"], model_type="new", vision_config={})
    assert found.reason == "preprocessing of its images is not implemented (NewModel)"


def test_a_folder_without_the_processors_file_says_so(tmp_path: Path) -> None:
    found = loaded(tmp_path, **LLAVA)
    assert "preprocessor_config.json" in found.reason


def test_an_engine_without_the_encoder_takes_no_images(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").parent.mkdir(exist_ok=True)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    found = loaded(tmp_path, INFO, **LLAVA)
    assert found.reason == "the model server has not loaded its image encoder"
