"""The API key: every request that makes the server do something has to bring it.

As in TGI, what only looks (GET: health, info, metrics, models) is open. RFC 6750, section 2.1.
"""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from tgi_cli.router import errors

_LOOKING = ("GET", "HEAD", "OPTIONS")


class KeyGuard:
    """ASGI middleware: 401 for requests without ``Authorization: Bearer KEY``.

    Keys are compared in a time that does not tell how much of one was right.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See https://asgi.readthedocs.io/en/latest/specs/www.html."""
        guarded = scope["type"] == "http" and scope["method"] not in _LOOKING
        if guarded and not self._is_known(scope):
            refusal = errors.error_response(scope["path"], errors.unauthorized())
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)
