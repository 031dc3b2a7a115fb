"""API keys, which every request but health checks and scrapes of metrics needs.

RFC 6750, section 2.1. TGI also left read-only routes (info, models, the API's document) and
``/chat_tokenize`` open; here all but public endpoints are guarded, unknown paths too.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Sequence
from hashlib import blake2b, sha256

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from tgi_cli.router.http import errors
from tgi_cli.router.http.endpoint import TENANT, Endpoint
from tgi_cli.router.http.error_styles import error_response
from tgi_cli.router.observability import access_log

TENANT_BYTES = 16
"""Length of what tells keys apart."""


class ApiKeys:
    """The keys of a server, and what tells their holders apart.

    Comparing keys takes a time that depends neither on how much of one is right nor on its length.

    A tenant is 16 bytes that are the same for requests with the same key: a keyed hash (BLAKE2, RFC
    7693) whose secret is made anew for each server and never leaves it, so that they tell nothing
    about the key.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        secret = secrets.token_bytes(32)
        self._keys = [
            (sha256(key).digest(), blake2b(key, key=secret, digest_size=TENANT_BYTES).digest())
            for key in (text.encode() for text in keys)
        ]

    def tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
        """The tenant whose valid key a request has, or None."""
        headers = list(headers)
        bearers, keys = (
            [value for name, value in headers if name == header]
            for header in (b"authorization", b"x-api-key")
        )
        if len(bearers) > 1 or len(keys) > 1 or not (bearers or keys):
            return None
        valid = True
        for given in bearers:
            scheme, _, key = given.partition(b" ")
            valid &= scheme.lower() == b"bearer"
            keys.append(key)
        digests = [sha256(key.strip()).digest() for key in keys]
        found = None
        for known, tenant in self._keys:  # all, so that the time does not depend on the match
            same = True
            for digest in digests:
                same &= hmac.compare_digest(digest, known)
            if same:
                found = tenant
        return found if valid else None


class ApiKeyMiddleware:
    """ASGI middleware: 401 without ``Authorization: Bearer KEY`` or Anthropic's ``x-api-key: KEY``.

    A request may have both if they are the same key, and each of them once: which of several
    counts must not depend on who reads them.

    A path that was sent with escapes is always guarded, so that no spelling of a guarded path
    passes for a public one.

    A request with a key gets ``scope["tenant"]``: see :class:`ApiKeys`.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._keys = ApiKeys(keys)
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See https://asgi.readthedocs.io/en/latest/specs/www.html."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        tenant = self._keys.tenant(scope["headers"])
        if tenant is not None:
            scope[TENANT] = tenant
        if tenant is not None or self._is_public(scope):
            await self._app(scope, receive, send)
            return
        error = errors.unauthorized()
        access_log.note(error)
        scope.setdefault("route", self._route(scope))
        await error_response(scope, error)(scope, receive, send)

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
