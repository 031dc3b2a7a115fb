"""Every error of the HTTP face: its status, its words, and its two bodies.

Native routes answer as TGI: ``{"error": TEXT, "error_type": TYPE}``, and plain text where TGI's
web framework answered by itself. /v1 routes answer as OpenAI
(https://platform.openai.com/docs/guides/error-codes), with ``error_type`` on top.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

_OPENAI_TYPES = {
    "overloaded": "rate_limit_exceeded",
    "generation": "server_error",
    "incomplete_generation": "server_error",
    "incomplete_generation_stream": "server_error",
    "internal": "server_error",
    "healthcheck": "server_error",
    "timeout": "server_error",
}

_FAILURE_LABELS = {
    "overloaded": "overloaded",
    "generation": "generation",
    "incomplete_generation": "incomplete",
    "incomplete_generation_stream": "incomplete",
    "template_error": "template",
    "timeout": "timeout",
}


class ApiError(Exception):
    """An answer that is not the one asked for.

    Attributes:
        status: of the HTTP response.
        message: the whole text, prefix included.
        error_type: TGI's word for the kind of error.
        param, code: OpenAI's: the parameter at fault; a word for programs.
        headers: of the response, such as Retry-After.
        plain: the native body is the bare message.
    """

    def __init__(
        self,
        status: int,
        message: str,
        error_type: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        plain: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.error_type = error_type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.plain = plain

    @property
    def failure_label(self) -> str:
        """The ``err`` label of ``tgi_request_failure``."""
        return _FAILURE_LABELS.get(self.error_type, "validation")


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


def validation(message: str, param: str | None = None) -> ApiError:
    """A parameter that cannot be."""
    return ApiError(422, f"Input validation error: {message}", "validation", param=param)


def unsupported(param: str, what: str | None = None) -> ApiError:
    """A known parameter that this server cannot act on: refused, never ignored."""
    return validation(f"{what or f'`{param}`'} is not supported by this server", param)


def bad_request(message: str) -> ApiError:
    """A body that cannot be, where vLLM says 400."""
    return ApiError(400, message, "validation")


def no_model(message: str) -> ApiError:
    """A model that this server does not have."""
    return ApiError(404, message, "not_found", param="model", code="model_not_found")


def unauthorized() -> ApiError:
    """No API key, or another one."""
    return ApiError(
        401,
        "the request needs the server's API key: Authorization: Bearer KEY",
        "unauthorized",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def late_body() -> ApiError:
    """The body did not come in time; the connection cannot be used again."""
    headers = {"connection": "close"}
    return ApiError(
        408, "The request's body did not arrive in time", "timeout", headers=headers, plain=True
    )


def forbidden(message: str) -> ApiError:
    """What this server does for nobody."""
    return ApiError(403, message, "forbidden", code="forbidden")


def engine_gone(cause: str) -> ApiError:
    """No engine to ask, at this moment: it may be starting again."""
    return ApiError(
        503, cause, "generation", code="service_unavailable", headers={"retry-after": "5"}
    )


def template(message: str) -> ApiError:
    """The chat template refused the conversation, or there is none."""
    return ApiError(422, f"Template error: {message}", "template_error", param="messages")


def overloaded(retry_after: int) -> ApiError:
    """More requests in flight than allowed; ``retry_after`` in seconds."""
    return ApiError(
        429,
        "Model is overloaded",
        "overloaded",
        code="rate_limit_exceeded",
        headers={"retry-after": str(retry_after)},
    )


def draining(retry_after: int) -> ApiError:
    """The server is about to stop and takes no new requests."""
    return ApiError(
        503,
        "Model is overloaded: the server is shutting down",
        "overloaded",
        code="service_unavailable",
        headers={"retry-after": str(retry_after)},
    )


def generation_failed(cause: str) -> ApiError:
    """The engine failed or is gone."""
    return ApiError(424, f"Request failed during generation: {cause}", "generation")


def timed_out(cause: str) -> ApiError:
    """The time that the client gave is up."""
    return ApiError(504, f"Request timed out: {cause}", "timeout", code="timeout")


def incomplete() -> ApiError:
    """The tokens ended without a reason."""
    return ApiError(500, "Incomplete generation", "incomplete_generation")


def internal() -> ApiError:
    """A defect; its traceback is in the log."""
    return ApiError(500, "Internal server error", "internal")


def native_body(error: ApiError) -> bytes:
    """The JSON object of native routes and their streams."""
    return msgspec.json.encode({"error": error.message, "error_type": error.error_type})


def openai_body(error: ApiError) -> bytes:
    """The JSON object of /v1 routes and their streams."""
    fallback = "invalid_request_error" if error.status < 500 else "server_error"
    return msgspec.json.encode(
        {
            "error": {
                "message": error.message,
                "type": _OPENAI_TYPES.get(error.error_type, fallback),
                "param": error.param,
                "code": error.code,
            },
            "error_type": error.error_type,
        }
    )


def error_response(path: str, error: ApiError) -> Response:
    """The error in the form of the API that ``path`` belongs to."""
    if path.startswith("/v1/"):
        body, media_type = openai_body(error), "application/json"
    elif error.plain:
        body, media_type = error.message.encode(), "text/plain"
    else:
        body, media_type = native_body(error), "application/json"
    return Response(body, error.status, headers=error.headers, media_type=media_type)
