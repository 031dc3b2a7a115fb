"""The router's HTTP API as an ASGI application."""

from __future__ import annotations

import json
import logging
import os

from starlette.applications import Starlette
from starlette.middleware import Middleware

from tgi_cli.router.adapter_names import AdapterNames
from tgi_cli.router.api import (
    adapters,
    chat,
    completions,
    docs,
    gateways,
    infill,
    kserve,
    messages,
    models,
    openapi,
    responses,
    sagemaker,
    service,
    sleep,
    stored_responses,
    tgi,
    tokenize,
    vertex,
    web_ui,
)
from tgi_cli.router.config import RouterConfig
from tgi_cli.router.engine_restart import DynamicAdapters, EngineRestart
from tgi_cli.router.engine_sleep import EngineSleep
from tgi_cli.router.generation.generator import Generator
from tgi_cli.router.generation.sampling_defaults import SamplingDefaults
from tgi_cli.router.http.admission import ConcurrencyLimiter
from tgi_cli.router.http.auth import ApiKeyMiddleware
from tgi_cli.router.http.cors import cors
from tgi_cli.router.http.error_handlers import error_handlers
from tgi_cli.router.observability.metrics import Metrics
from tgi_cli.router.observability.middleware import ObservabilityMiddleware
from tgi_cli.router.observability.tracing import Tracing
from tgi_cli.router.replicas.pool import EnginePool
from tgi_cli.router.response_store import ResponseStore
from tgi_cli.router.state import RouterState
from tgi_cli.rpc.interface import EngineClient
from tgi_cli.text.bundle import TextBundle
from tgi_cli.text.grammar.checker import GrammarChecker
from tgi_cli.text.workers import TextWorkers
from tgi_cli.vision.load import TEXT_ONLY, Vision

logger = logging.getLogger(__name__)

ROUTES = [
    *tgi.ROUTES,
    *tokenize.ROUTES,
    *chat.ROUTES,
    *completions.ROUTES,
    *infill.ROUTES,
    *responses.ROUTES,
    *stored_responses.ROUTES,
    *messages.ROUTES,
    *models.ROUTES,
    *adapters.ROUTES,
    *sagemaker.ROUTES,
    *vertex.ROUTES,
    *kserve.ROUTES,
    *service.ROUTES,
    *sleep.ROUTES,
    *gateways.ROUTES,
    *web_ui.ROUTES,
    *docs.ROUTES,
]
"""All routes but those that Vertex AI's environment names."""


def create_app(
    client: EngineClient, text: TextBundle, config: RouterConfig, vision: Vision = TEXT_ONLY
) -> Starlette:
    """The application in front of a connected engine; its state is ``app.state.router``.

    ``vision`` reads the images of prompts, and ends with the application's state.

    Raises ConfigError if the environment names an invalid route, or traces cannot be sent.
    """
    workers = TextWorkers(text.tokenizer, config.validation_workers)
    metrics = Metrics(client.info)
    admission = ConcurrencyLimiter(config.max_concurrent_requests)
    grammars = None
    if client.info.grammar and not config.disable_grammar_support:
        grammars = GrammarChecker(text.tokenizer, client.info.eos_token_ids)
    dynamic = client.dynamic if isinstance(client, EnginePool) else DynamicAdapters(client)
    engine_sleep = EngineSleep(client, admission, dynamic)
    generator = Generator(client, text, workers, metrics, admission, engine_sleep, grammars, vision)
    EngineRestart(client, config, generator, dynamic)
    routes = [*vertex.environment_routes(os.environ), *ROUTES]
    tracing = None
    if config.otlp_endpoint is not None:
        tracing = Tracing(config.otlp_endpoint, config.otlp_service_name, config.served_names[0])
    middleware = [
        Middleware(ObservabilityMiddleware, tracing=tracing),
        cors(config.cors_allow_origin),
    ]
    if config.api_keys:
        middleware.append(Middleware(ApiKeyMiddleware, keys=config.api_keys, routes=routes))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers=error_handlers(),
    )
    app.router.redirect_slashes = False
    names = AdapterNames(client, config.model_id, dynamic, config.served_model_name)
    defaults = SamplingDefaults()
    if config.generation_config == "auto":
        defaults = SamplingDefaults.read(config.model_path)
    app.state.router = RouterState(
        config,
        client,
        text,
        workers,
        metrics,
        admission,
        generator,
        names,
        defaults,
        ResponseStore(config.response_store_bytes, config.response_store_seconds),
        tracing,
        vision.reader,
    )
    return app


def schema() -> str:
    """The API's document as JSON, for a server without API key."""
    routes = [*vertex.environment_routes(os.environ), *ROUTES]
    return json.dumps(openapi.document(routes, guarded=False), indent=2)
