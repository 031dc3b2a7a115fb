"""Answers to what the handlers of an application raise."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tgi_cli.errors import ModelError
from tgi_cli.router.http import errors
from tgi_cli.router.http.error_styles import error_response
from tgi_cli.router.http.unknown_paths import path_hint
from tgi_cli.router.observability import access_log


def error_handlers() -> dict[Any, Callable[[Request, Exception], Awaitable[Response]]]:
    """The exception handlers of a Starlette application."""
    return {
        errors.ApiError: _api_error,
        errors.ClientDisconnected: _client_disconnected,
        ModelError: _model_error,
        HTTPException: _http_error,
    }


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.ApiError)
    access_log.note(error)
    return error_response(request.scope, error)


async def _model_error(request: Request, error: Exception) -> Response:
    """The model's tokenizer fails on a text of the request."""
    assert isinstance(error, ModelError)
    return await _api_error(request, errors.tokenizer(error.cause))


async def _client_disconnected(request: Request, error: Exception) -> Response:
    # Never sent, but logged: nginx's status for a closed connection.
    return Response(status_code=499)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors, for unknown routes and methods."""
    assert isinstance(error, HTTPException)
    words = {
        404: ("Not Found", "not_found", "unknown_url"),
        405: ("Method Not Allowed", "method_not_allowed", "method_not_supported"),
    }
    message, kind, code = words.get(error.status_code, (str(error.detail), "validation", None))
    path, headers = request.scope["path"], dict(error.headers or {})
    hint = ""
    if error.status_code == 404:
        hint = path_hint(path, {getattr(route, "path", "") for route in request.app.routes})
    elif "Allow" in headers:
        hint = f"use {headers['Allow']}"
    text = f"{message}: {request.method} {path}" + (f": {hint}" if hint else "")
    return error_response(
        request.scope,
        errors.ApiError(error.status_code, text, kind, code=code, headers=headers),
    )
