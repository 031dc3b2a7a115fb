"""A router over a scripted engine: in process, and on a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette

from tests.router.fakes import FakeEngine
from tests.unit.text import tiny
from tgi_cli.router.app import create_app
from tgi_cli.router.config import RouterConfig
from tgi_cli.router.state import RouterState
from tgi_cli.text.bundle import TextBundle


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def text(model_path: Path) -> TextBundle:
    return TextBundle.load(model_path)


@pytest.fixture
def engine(text: TextBundle) -> FakeEngine:
    return FakeEngine(text.tokenizer)


@pytest.fixture
def config(model_path: Path) -> RouterConfig:
    return RouterConfig(model_path=model_path, model_id="acme/tiny", engine_url="unix:///none")


@pytest.fixture
def settings() -> dict[str, Any]:
    """Override in a test module or class to change the router's configuration."""
    return {}


@pytest.fixture
def app(
    engine: FakeEngine, text: TextBundle, config: RouterConfig, settings: dict[str, Any]
) -> Starlette:
    return create_app(engine, text, replace(config, **settings))


@pytest.fixture
def state(app: Starlette) -> RouterState:
    state: RouterState = app.state.router
    return state


@pytest.fixture
async def client(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        yield client


@pytest.fixture
async def url(app: Starlette) -> AsyncIterator[str]:
    """The same app behind uvicorn on a free port."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(
            app, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
        )
    )
    serving = asyncio.ensure_future(server._serve([listener]))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    await serving
