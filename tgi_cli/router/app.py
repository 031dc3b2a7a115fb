"""The HTTP face as an ASGI application."""

from __future__ import annotations

import logging
import os

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tgi_cli.router import errors
from tgi_cli.router.adapters import AdapterNames
from tgi_cli.router.admission import Admission
from tgi_cli.router.auth import KeyGuard
from tgi_cli.router.config import RouterConfig
from tgi_cli.router.defaults import SamplingDefaults
from tgi_cli.router.generator import Generator
from tgi_cli.router.metrics import Metrics
from tgi_cli.router.routes import (
    adapters,
    chat,
    completions,
    docs,
    health,
    info,
    kserve,
    metrics,
    models,
    native,
    sagemaker,
    tokenize,
    vertex,
)
from tgi_cli.router.state import RouterState
from tgi_cli.rpc.interface import EngineClient
from tgi_cli.text.bundle import TextBundle
from tgi_cli.text.offload import TextWorkers

logger = logging.getLogger(__name__)

_MODULES = (
    native,
    tokenize,
    chat,
    completions,
    models,
    adapters,
    sagemaker,
    vertex,
    kserve,
    health,
    info,
    metrics,
    docs,
)


def create_app(client: EngineClient, text: TextBundle, config: RouterConfig) -> Starlette:
    """The application over a connected engine; its parts are in ``app.state.router``.

    Raises ConfigError when the environment names a route that cannot be.
    """
    workers = TextWorkers(text.tokenizer, config.validation_workers)
    measured = Metrics(client.info)
    admission = Admission(config.max_concurrent_requests)
    generator = Generator(client, text, workers, measured, admission)
    app = Starlette(
        routes=[
            *vertex.environment_routes(os.environ),
            *(route for module in _MODULES for route in module.ROUTES),
        ],
        exception_handlers={
            errors.ApiError: _api_error,
            errors.ClientGone: _client_gone,
            HTTPException: _http_error,
            Exception: _defect,
        },
    )
    app.router.redirect_slashes = False
    if config.api_key is not None:
        app.add_middleware(KeyGuard, key=config.api_key)
    names = AdapterNames(client, config.model_id)
    defaults = SamplingDefaults()
    if config.generation_config == "auto":
        defaults = SamplingDefaults.read(config.model_path)
    app.state.router = RouterState(
        config, client, text, workers, measured, admission, generator, names, defaults
    )
    return app


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.ApiError)
    return errors.error_response(request.url.path, error)


async def _client_gone(request: Request, error: Exception) -> Response:
    # Nobody reads it; the status is nginx's for a closed connection.
    return Response(status_code=499)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, which Starlette answers by itself."""
    assert isinstance(error, HTTPException)
    words = {404: ("Not Found", "not_found"), 405: ("Method Not Allowed", "method_not_allowed")}
    message, error_type = words.get(error.status_code, (str(error.detail), "validation"))
    where = f"{message}: {request.method} {request.url.path}"
    return errors.error_response(
        request.url.path,
        errors.ApiError(error.status_code, where, error_type, headers=error.headers),
    )


async def _defect(request: Request, error: Exception) -> Response:
    # Starlette raises the error again behind this answer, and the server logs its traceback.
    return errors.error_response(request.url.path, errors.internal())
