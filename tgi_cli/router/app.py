"""The HTTP face as an ASGI application."""

from __future__ import annotations

import json
import logging
import os

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from tgi_cli.errors import ModelError
from tgi_cli.router.adapter_names import AdapterNames
from tgi_cli.router.adapter_restore import DynamicAdapters
from tgi_cli.router.api import (
    adapters,
    chat,
    completions,
    docs,
    embeddings,
    health,
    info,
    kserve,
    metrics,
    models,
    openapi,
    responses,
    sagemaker,
    tgi,
    tokenize,
    vertex,
    vllm,
)
from tgi_cli.router.config import RouterConfig
from tgi_cli.router.engine_restart import EngineRestart
from tgi_cli.router.generation.generator import Generator
from tgi_cli.router.generation.sampling_defaults import SamplingDefaults
from tgi_cli.router.http import errors
from tgi_cli.router.http.admission import ConcurrencyLimiter
from tgi_cli.router.http.auth import ApiKeyMiddleware
from tgi_cli.router.http.cors import cors
from tgi_cli.router.observability import access_log
from tgi_cli.router.observability.metrics import Metrics
from tgi_cli.router.observability.middleware import ObservabilityMiddleware
from tgi_cli.router.observability.tracing import Tracing
from tgi_cli.router.state import RouterState
from tgi_cli.rpc.interface import EngineClient
from tgi_cli.text.bundle import TextBundle
from tgi_cli.text.grammar.checker import GrammarChecker
from tgi_cli.text.workers import TextWorkers

logger = logging.getLogger(__name__)

_MODULES = (
    tgi,
    tokenize,
    chat,
    completions,
    responses,
    models,
    embeddings,
    vllm,
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

    Raises ConfigError when the environment names a route that cannot be, or traces cannot be sent.
    """
    workers = TextWorkers(text.tokenizer, config.validation_workers)
    measured = Metrics(client.info)
    admission = ConcurrencyLimiter(config.max_concurrent_requests)
    grammars = None
    if client.info.grammar and not config.disable_grammar_support:
        grammars = GrammarChecker(text.tokenizer, client.info.eos_token_ids)
    generator = Generator(client, text, workers, measured, admission, grammars)
    kept = DynamicAdapters(client)
    EngineRestart(client, config, generator, measured, kept)
    routes = _routes()
    tracing = None
    if config.otlp_endpoint is not None:
        tracing = Tracing(config.otlp_endpoint, config.otlp_service_name)
    middleware = [
        Middleware(ObservabilityMiddleware, tracing=tracing),
        cors(config.cors_allow_origin),
    ]
    if config.api_keys:
        middleware.append(Middleware(ApiKeyMiddleware, keys=config.api_keys, routes=routes))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            errors.ApiError: _api_error,
            errors.ClientDisconnected: _client_gone,
            ModelError: _model_error,
            HTTPException: _http_error,
        },
    )
    app.router.redirect_slashes = False
    names = AdapterNames(client, config.model_id, kept)
    defaults = SamplingDefaults()
    if config.generation_config == "auto":
        defaults = SamplingDefaults.read(config.model_path)
    app.state.router = RouterState(
        config, client, text, workers, measured, admission, generator, names, defaults, tracing
    )
    return app


def schema() -> str:
    """The document of the API as JSON, of a server that asks for no key."""
    return json.dumps(openapi.document(_routes(), guarded=False), indent=2)


def _routes() -> list[BaseRoute]:
    return [
        *vertex.environment_routes(os.environ),
        *(route for module in _MODULES for route in module.ROUTES),
    ]


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.ApiError)
    access_log.note(error)
    return errors.error_response(request.scope, error)


async def _model_error(request: Request, error: Exception) -> Response:
    """The tokenizer of the checkpoint fails on what the request says."""
    assert isinstance(error, ModelError)
    return await _api_error(request, errors.tokenizer(error.cause))


async def _client_gone(request: Request, error: Exception) -> Response:
    # Nobody reads it; the status is nginx's for a closed connection.
    return Response(status_code=499)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, which Starlette answers by itself."""
    assert isinstance(error, HTTPException)
    words = {
        404: ("Not Found", "not_found", "unknown_url"),
        405: ("Method Not Allowed", "method_not_allowed", "method_not_supported"),
    }
    message, kind, code = words.get(error.status_code, (str(error.detail), "validation", None))
    where = f"{message}: {request.method} {request.scope['path']}"
    return errors.error_response(
        request.scope,
        errors.ApiError(error.status_code, where, kind, code=code, headers=error.headers),
    )
