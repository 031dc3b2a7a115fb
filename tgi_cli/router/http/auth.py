"""API keys, which every request but health checks and scrapes of metrics needs.

RFC 6750, section 2.1. TGI also left read-only routes (info, models, the API's document) and
``/chat_tokenize`` open; here all but public endpoints are guarded, unknown paths too.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from hashlib import sha256

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from tgi_cli.router.http import errors
from tgi_cli.router.http.endpoint import Endpoint
from tgi_cli.router.http.error_styles import error_response
from tgi_cli.router.observability import access_log


class ApiKeyMiddleware:
    """ASGI middleware: 401 without ``Authorization: Bearer KEY`` or Anthropic's ``x-api-key: KEY``.

    A request may have both if they are the same key, and each of them once: which of several
    counts must not depend on who reads them.

    A path that was sent with escapes is always guarded, so that no spelling of a guarded path
    passes for a public one. Comparing keys takes a time that depends neither on how much of one
    is right nor on its length.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._keys = [sha256(key.encode()).digest() for key in keys]
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See https://asgi.readthedocs.io/en/latest/specs/www.html."""
        if scope["type"] != "http" or self._has_key(scope) or self._is_public(scope):
            await self._app(scope, receive, send)
            return
        error = errors.unauthorized()
        access_log.note(error)
        scope.setdefault("route", self._route(scope))
        await error_response(scope, error)(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        bearers, keys = (
            [value for name, value in scope["headers"] if name == header]
            for header in (b"authorization", b"x-api-key")
        )
        if len(bearers) > 1 or len(keys) > 1 or not (bearers or keys):
            return False
        valid = True
        for given in bearers:
            scheme, _, key = given.partition(b" ")
            valid &= scheme.lower() == b"bearer"
            keys.append(key)
        digests = [sha256(key.strip()).digest() for key in keys]
        found = False
        for known in self._keys:  # all, so that the time does not depend on the match
            same = True
            for digest in digests:
                same &= hmac.compare_digest(digest, known)
            found |= same
        return found and valid

    def _is_public(self, scope: Scope) -> bool:
        raw = scope.get("raw_path") or b""
        if scope["method"] not in ("GET", "HEAD") or raw != scope["path"].encode():
            return False
        route = self._route(scope)
        return isinstance(route, Endpoint) and route.operation.public

    def _route(self, scope: Scope) -> BaseRoute | None:
        return next(
            (route for route in self._routes if route.matches(scope)[0] is Match.FULL), None
        )
