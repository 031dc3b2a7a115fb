"""Hostile images and addresses over HTTP: each is refused by name, none is a server's error."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpcore
import httpx
import pytest
from starlette.applications import Starlette

from tests.router.fakes import FakeEngine
from tests.tools import fake_vision
from tests.unit.vision.hostile_files import FILES, MAX_PIXELS, Refused
from tests.unit.vision.test_fetch import CORPUS, REAL
from tgi_cli.router.app import create_app
from tgi_cli.router.config import RouterConfig
from tgi_cli.text.bundle import TextBundle
from tgi_cli.vision.fetch import MediaFetcher, resolve
from tgi_cli.vision.limits import ImageLimits
from tgi_cli.vision.load import Vision
from tgi_cli.vision.prompts import ImageReader
from tgi_cli.vision.service import ImageService

NAMES: dict[str, list[str]] = {}
"""What host names resolve to."""


async def names(host: str, port: int) -> list[str]:
    return NAMES[host] if host in NAMES else await resolve(host, port)


@pytest.fixture(scope="module")
def service(text: TextBundle) -> Iterator[ImageService]:
    limits = ImageLimits(media_fetch=True, max_image_pixels=MAX_PIXELS, image_workers=1)
    service = ImageService(
        Path("model"),
        fake_vision.image_format(text.tokenizer),
        limits,
        fetcher=MediaFetcher(limits, names),
        module="tests.unit.vision.image_process",
    )
    yield service
    service.close()


@pytest.fixture
def app(
    engine: FakeEngine, text: TextBundle, config: RouterConfig, service: ImageService
) -> Starlette:
    found = fake_vision.image_format(text.tokenizer)
    return create_app(engine, text, config, Vision(ImageReader(found, service, 4)))


async def ask(client: httpx.AsyncClient, url: str) -> dict[str, httpx.Response]:
    part = {"type": "image_url", "image_url": {"url": url}}
    chat = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    plain = {"inputs": f"![]({url})", "parameters": {"max_new_tokens": 1}}
    return {
        "openai": await client.post("/v1/chat/completions", json=chat),
        "tgi": await client.post("/generate", json=plain),
    }


async def test_hostile_files(client: httpx.AsyncClient, service: ImageService) -> None:
    pids = service.pool.process_ids
    for name, (make, expected) in FILES.items():
        encoded = base64.b64encode(make()).decode()
        answers = await ask(client, f"data:image/png;base64,{encoded}")
        if not isinstance(expected, Refused):
            assert {answer.status_code for answer in answers.values()} == {200}, name
            continue
        assert answers["tgi"].status_code == 422, name
        assert answers["tgi"].json() == {
            "error": f"Input validation error: {expected.text}",
            "error_type": "validation",
        }
        assert answers["openai"].status_code == 400, name
        error = answers["openai"].json()["error"]
        assert error["type"] == "invalid_request_error"
        assert (error["message"], error["code"]) == (expected.text, expected.code)
    assert service.pool.process_ids == pids


async def test_hostile_addresses(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialled: list[str] = []

    async def handle(self: Any, request: httpcore.Request) -> httpcore.Response:
        dialled.append(request.url.host.decode())
        return httpcore.Response(200, content=b"no image")

    monkeypatch.setattr(httpcore.AsyncConnectionPool, "handle_async_request", handle)
    for url, found, expected in CORPUS:
        dialled.clear()
        NAMES.clear()
        if found is not REAL:
            NAMES.update({host: list(found) for host in ("a.example", httpx_host(url))})
        answers = await ask(client, url)
        assert answers["openai"].status_code == 400, url
        assert answers["tgi"].status_code == 422, url
        allowed = expected[0].isdigit()
        assert dialled == ([expected] * 2 if allowed else []), url
        if allowed:
            assert "it is not a PNG" in answers["tgi"].text


def httpx_host(url: str) -> str:
    """The host of a URL as it is resolved, or nothing if it is invalid."""
    try:
        return httpx.URL(url).raw_host.decode()
    except (httpx.InvalidURL, ValueError):
        return ""
