"""The outermost middleware: request ids, access records, traces and unexpected exceptions."""

from __future__ import annotations

import logging
import re
import uuid
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tgi_cli.router.http import errors
from tgi_cli.router.http.error_styles import ANTHROPIC, error_response, style_for
from tgi_cli.router.http.sse import DIRECT_SEND
from tgi_cli.router.observability import access_log

if TYPE_CHECKING:
    from tgi_cli.router.observability.tracing import RequestTracing

logger = logging.getLogger(__name__)

_ID = re.compile(rb"[A-Za-z0-9._:/+=@~-]{1,128}")
"""Valid request ids of clients, which cannot break a log line or a header."""
_EVENTS = (b"content-type", b"text/event-stream")


class ObservabilityMiddleware:
    """ASGI middleware that sets ``x-request-id`` on every answer, errors included.

    Anthropic's clients read it as ``request-id``.
    """

    def __init__(self, app: ASGIApp, tracing: RequestTracing | None = None) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See https://asgi.readthedocs.io/en/latest/specs/www.html."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = access_log.AccessRecord(_request_id(scope), scope["method"], scope["path"])
        access_log.begin(record)
        span = None if self._tracing is None else self._tracing.begin(record, scope)
        named = [(b"x-request-id", record.request_id.encode())]
        if style_for(scope) is ANTHROPIC:
            named.append((b"request-id", record.request_id.encode()))
        scope[DIRECT_SEND] = send

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if span is not None:
                    record.streamed = _EVENTS in message.get("headers", ())
                message["headers"] = [*message.get("headers", ()), *named]
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception:  # a bug: the client gets an answer, the log the traceback
            failure = errors.internal()
            access_log.note(failure)
            if record.status:
                raise  # uvicorn logs it and closes the connection
            logger.exception("a request failed", extra={"request_id": record.request_id})
            await error_response(scope, failure)(scope, receive, send_named)
        finally:
            route = scope.get("route")
            record.route = getattr(route, "path", "")
            access_log.write(record)
            if span is not None:
                span.end()


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ID.fullmatch(value):
            return str(value, "ascii")
    return uuid.uuid4().hex
