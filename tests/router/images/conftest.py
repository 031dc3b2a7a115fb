"""A router in front of a scripted engine of a vision-language model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from starlette.applications import Starlette

from tests.router.fakes import FakeEngine
from tests.tools import fake_vision
from tests.tools.fake_vision import FakeImages
from tgi_cli.router.app import create_app
from tgi_cli.router.config import RouterConfig
from tgi_cli.text.bundle import TextBundle


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextBundle:
    return fake_vision.bundle(tmp_path_factory.mktemp("sees"))


@pytest.fixture
def engine(text: TextBundle) -> FakeEngine:
    engine = FakeEngine(text.tokenizer)
    engine.info = replace(
        engine.info, max_input_tokens=299, max_total_tokens=300, vision=True, max_image_rows=64
    )
    return engine


@pytest.fixture
def images() -> FakeImages:
    return FakeImages()


@pytest.fixture
def app(
    engine: FakeEngine,
    text: TextBundle,
    config: RouterConfig,
    settings: dict[str, Any],
    images: FakeImages,
) -> Starlette:
    return create_app(engine, text, replace(config, **settings), fake_vision.vision(text, images))
