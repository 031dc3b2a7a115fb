"""The default size of bodies: TGI's for text, more for models that take images."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from tests.router.wire import POST, served
from tgi_cli.router.config import IMAGE_PAYLOAD, TEXT_PAYLOAD
from tgi_cli.router.http.protocol import body_seconds
from tgi_cli.router.server import uvicorn_config
from tgi_cli.router.state import RouterState


class Images:
    """Stands for :class:`tgi_cli.vision.service.ImageService`."""

    closed = False

    def close(self) -> None:
        self.closed = True


def with_images(state: RouterState) -> RouterState:
    return replace(state, images=Images())  # type: ignore[arg-type]


class TestDefault:
    def test_models_of_text_have_tgis_limit(self, state: RouterState) -> None:
        assert state.payload_limit == TEXT_PAYLOAD == 2_000_000

    def test_models_that_take_images_have_a_larger_one(self, state: RouterState) -> None:
        assert with_images(state).payload_limit == IMAGE_PAYLOAD == 32_000_000

    @pytest.mark.parametrize("sees", [False, True])
    async def test_larger_bodies_are_413(
        self, app: Starlette, state: RouterState, client: httpx.AsyncClient, sees: bool
    ) -> None:
        app.state.router = with_images(state) if sees else state
        large = {"inputs": "hi", "parameters": {"max_new_tokens": 1}, "padding": "x" * 3_000_000}
        answer = await client.post("/generate", json=large)
        assert answer.status_code == (200 if sees else 413)
        if sees:
            large["padding"] = "x" * 32_000_000
            answer = await client.post("/generate", json=large)
            assert answer.status_code == 413
            assert "(32000000 bytes)" in answer.text

    def test_larger_bodies_have_more_time(self, app: Starlette, state: RouterState) -> None:
        for each in (state, with_images(state)):
            app.state.router = each
            made = uvicorn_config(app, each.config).http_protocol_class
            assert made.keywords == {"body_seconds": body_seconds(each.payload_limit)}  # type: ignore[union-attr]


class TestFlag:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"payload_limit": 5_000_000}

    def test_a_flag_holds_for_all(self, state: RouterState) -> None:
        assert state.payload_limit == with_images(state).payload_limit == 5_000_000


class TestManyAtATime:
    """Bodies that are being read take no more memory than those of the requests that may run."""

    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"payload_limit": 1000, "max_concurrent_requests": 3}

    def test_the_bound_is_that_of_the_requests_that_may_run(self, state: RouterState) -> None:
        assert state.bodies.most == 3000

    async def test_more_are_refused_until_some_are_read(
        self, client: httpx.AsyncClient, state: RouterState
    ) -> None:
        goes_on = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield b'{"inputs": "a", "parameters": {"max_new_tokens": 1},'.ljust(900)
            await goes_on.wait()
            yield b'"a": 1}'

        headers = {"content-type": "application/json"}
        reading = [
            asyncio.create_task(client.post("/generate", content=slow(), headers=headers))
            for _ in range(3)
        ]
        async with asyncio.timeout(60):
            while state.bodies.taken < 2700:  # noqa: ASYNC110 (it has no event)
                await asyncio.sleep(0)
        for route, body in (
            ("/generate", {"inputs": "a" * 400}),
            ("/v1/completions", {"prompt": "a" * 400}),
        ):
            answer = await client.post(route, json=body)
            assert answer.status_code == 429
            assert answer.json()["error_type"] == "overloaded"
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.headers["connection"] == "close", "the rest of the body stays unread"
        small = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
        assert (await client.post("/generate", json=small)).status_code == 200
        goes_on.set()
        assert [answer.status_code for answer in await asyncio.gather(*reading)] == [200] * 3
        assert state.bodies.taken == 0

    async def test_clients_that_go_free_theirs(self, app: Starlette, state: RouterState) -> None:
        async with served(app) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(POST + b"content-length: 900\r\n\r\n" + b" " * 700)
            async with asyncio.timeout(60):
                while not state.bodies.taken:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                assert state.bodies.taken == 700
                writer.transport.abort()
                while state.bodies.taken:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)


async def test_the_processes_of_images_end_with_the_router(state: RouterState) -> None:
    # The chat template is shared with other tests.
    seen = replace(with_images(state), text=replace(state.text, chat_template=None))
    await seen.close()
    assert seen.images is not None
    assert seen.images.closed  # type: ignore[attr-defined]
