"""The default size of bodies: TGI's for text, more for models that take images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from tgi_cli.router.config import IMAGE_PAYLOAD, TEXT_PAYLOAD
from tgi_cli.router.http.protocol import body_seconds
from tgi_cli.router.server import uvicorn_config
from tgi_cli.router.state import RouterState


class Images:
    """Stands for :class:`tgi_cli.vision.service.ImageService`."""

    closed = False

    def close(self) -> None:
        self.closed = True


def seeing(state: RouterState) -> RouterState:
    return replace(state, images=Images())  # type: ignore[arg-type]


class TestDefault:
    def test_models_of_text_have_tgis_limit(self, state: RouterState) -> None:
        assert state.payload_limit == TEXT_PAYLOAD == 2_000_000

    def test_models_that_take_images_have_a_larger_one(self, state: RouterState) -> None:
        assert seeing(state).payload_limit == IMAGE_PAYLOAD == 32_000_000

    @pytest.mark.parametrize("sees", [False, True])
    async def test_larger_bodies_are_413(
        self, app: Starlette, state: RouterState, client: httpx.AsyncClient, sees: bool
    ) -> None:
        app.state.router = seeing(state) if sees else state
        large = {"inputs": "hi", "parameters": {"max_new_tokens": 1}, "padding": "x" * 3_000_000}
        answer = await client.post("/generate", json=large)
        assert answer.status_code == (200 if sees else 413)
        if sees:
            large["padding"] = "x" * 32_000_000
            answer = await client.post("/generate", json=large)
            assert answer.status_code == 413
            assert "(32000000 bytes)" in answer.text

    def test_larger_bodies_have_more_time(self, app: Starlette, state: RouterState) -> None:
        for each in (state, seeing(state)):
            app.state.router = each
            made = uvicorn_config(app, each.config).http_protocol_class
            assert made.keywords == {"body_seconds": body_seconds(each.payload_limit)}  # type: ignore[union-attr]


class TestFlag:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"payload_limit": 5_000_000}

    def test_a_flag_holds_for_all(self, state: RouterState) -> None:
        assert state.payload_limit == seeing(state).payload_limit == 5_000_000


async def test_the_processes_of_images_end_with_the_router(state: RouterState) -> None:
    # The chat template is shared with other tests.
    seen = replace(seeing(state), text=replace(state.text, chat_template=None))
    await seen.close()
    assert seen.images is not None
    assert seen.images.closed  # type: ignore[attr-defined]
