"""The API keys: every request has to bring one, but those that only ask whether the server is well.

RFC 6750, section 2.1. TGI left open what only looks (info, models, the API's document) and
``/chat_tokenize``; here what is not listed as open is guarded, unknown paths too.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from hashlib import sha256

from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tgi_cli.router.api.operations import NAMED, OPERATIONS
from tgi_cli.router.http import errors
from tgi_cli.router.observability import access_log

_LOOKING = ("GET", "HEAD")


class ApiKeyMiddleware:
    """ASGI middleware: 401 for requests without ``Authorization: Bearer KEY``.

    What is open is decided on the path as it was sent: one that is written with escapes is
    guarded, and so no spelling of a guarded path passes for an open one. Keys are compared in a
    time that tells neither how much of one was right nor how long it is.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._keys = [sha256(key.encode()).digest() for key in keys]
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See https://asgi.readthedocs.io/en/latest/specs/www.html."""
        if scope["type"] != "http" or self._brings_key(scope) or self._is_open(scope):
            await self._app(scope, receive, send)
            return
        error = errors.unauthorized()
        access_log.note(error)
        scope.setdefault("route", self._route(scope))
        await errors.error_response(scope, error)(scope, receive, send)

    def _brings_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        digest = sha256(key.strip()).digest()
        found = False
        for known in self._keys:  # all of them: which one it is takes no time to find
            found |= hmac.compare_digest(digest, known)
        return found and scheme.lower() == b"bearer"

    def _is_open(self, scope: Scope) -> bool:
        raw = scope.get("raw_path") or b""
        if scope["method"] not in _LOOKING or raw != scope["path"].encode():
            return False
        route = self._route(scope)
        return isinstance(route, Route) and _open(route)

    def _route(self, scope: Scope) -> BaseRoute | None:
        return next(
            (route for route in self._routes if route.matches(scope)[0] is Match.FULL), None
        )


def _open(route: Route) -> bool:
    operation = NAMED.get(route.name) or OPERATIONS.get(("GET", route.path_format))
    return operation is not None and operation.open
