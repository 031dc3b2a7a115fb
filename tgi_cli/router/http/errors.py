"""Errors of the HTTP API, in TGI's and in OpenAI's form.

TGI's routes answer ``{"error": TEXT, "error_type": TYPE}``, and plain text where TGI's web
framework did. OpenAI's routes answer as OpenAI
(https://platform.openai.com/docs/guides/error-codes), with ``error_type`` added: 400 where TGI
has 422, so that clients raise ``BadRequestError``, and 500 where TGI has 424, which OpenAI's
clients take for a server error and retry. The path decides on the form when the error is written.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace

import msgspec
from starlette.responses import Response
from starlette.types import Scope

_OPENAI_STATUSES = {422: 400, 424: 500}
_OPENAI_PATHS = frozenset(
    (
        "/v1", "/chat/completions", "/completions", "/responses", "/models", "/embeddings",
        "/detokenize", "/version",
    )
)  # fmt: skip
_OPENAI_PREFIXES = ("/v1/", "/models/")
_VERTEX_ROUTES = ("vertex_predict", "vertex_health")
"""Names of routes whose paths Vertex AI chooses, such as /v1/endpoints/..., in TGI's form."""
_RESPONSES = ("/v1/responses", "/responses")
_RESPONSES_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Names of a chat's parameters in a request for a response, which is translated into a chat."""

_FAILURE_LABELS = {
    "overloaded": "overloaded",
    "generation": "generation",
    "incomplete_generation": "incomplete",
    "incomplete_generation_stream": "incomplete",
    "template_error": "template",
    "timeout": "timeout",
}


@dataclass(eq=False)
class ApiError(Exception):
    """An error that the client gets as the answer.

    Attributes:
        status: HTTP status in TGI's form.
        message: full text in TGI's form, prefix included.
        error_type: TGI's type of error.
        param: OpenAI's name of the invalid parameter.
        code: OpenAI's error code.
        openai_message: text in OpenAI's form. Default: ``message``.
        keep_names: the error names parameters as the client did, also on /v1/responses.
        headers: headers of the answer, such as Retry-After.
        plain: the body in TGI's form is the plain message.
    """

    status: int
    message: str
    error_type: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    openai_message: str = ""
    keep_names: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    plain: bool = False

    def __post_init__(self) -> None:
        self.openai_message = self.openai_message or self.message

    def __str__(self) -> str:
        return self.message

    @property
    def openai_type(self) -> str:
        """OpenAI's type of error; for 429 the type whose limit was reached."""
        if self.status == 429:
            return "requests"
        return "invalid_request_error" if openai_status(self.status) < 500 else "server_error"

    @property
    def response_code(self) -> str:
        """``error.code`` of a failed response, one of those that OpenAI lists."""
        if self.code in ("rate_limit_exceeded", "context_length_exceeded"):
            return self.code
        return "invalid_prompt" if openai_status(self.status) < 500 else "server_error"

    @property
    def failure_label(self) -> str:
        """The ``err`` label of ``tgi_request_failure``."""
        return _FAILURE_LABELS.get(self.error_type, "validation")


class ClientDisconnected(Exception):
    """The client closed the connection before the answer."""


def validation(
    message: str, param: str | None = None, code: str = "invalid_value", openai_message: str = ""
) -> ApiError:
    """An invalid parameter; OpenAI's message has no prefix, and may differ."""
    return ApiError(
        422,
        f"Input validation error: {message}",
        "validation",
        param=param,
        code=code,
        openai_message=openai_message or message,
    )


def unsupported(
    param: str, what: str | None = None, code: str = "unsupported_parameter"
) -> ApiError:
    """A known parameter that this server cannot honour, and therefore does not ignore.

    With the code ``unsupported_value``, ``what`` names the values. Default: the parameter.
    """
    return validation(f"{what or f'`{param}`'} is not supported by this server", param, code)


def context_length(
    message: str, param: str, *, context: int, most: int, prompt: int, completion: int | None
) -> ApiError:
    """More tokens than the context holds.

    Agents recognise OpenAI's code and text, and shorten the conversation.

    Args:
        message: text in TGI's form.
        param: parameter that the prompt comes from.
        context: limit of prompt and completion together.
        most: limit of a prompt.
        prompt: tokens of the prompt.
        completion: requested tokens, or None if the prompt alone is too long.
    """
    words = f"This model's maximum context length is {context} tokens"
    if completion is not None:
        words += (
            f". However, you requested {prompt + completion} tokens ({prompt} in the {param}, "
            f"{completion} in the completion). Please reduce the length of the {param} or of the "
            "completion."
        )
    else:
        words += f", {most} of them for the {param}" if prompt <= context else ""
        words += (
            f". However, your {param} resulted in {prompt} tokens. Please reduce the length of "
            f"the {param}."
        )
    return validation(message, param, "context_length_exceeded", words)


def bad_request(message: str) -> ApiError:
    """An invalid body, on routes of vLLM."""
    return ApiError(400, message, "validation")


def no_model(message: str) -> ApiError:
    """An unknown model."""
    return ApiError(404, message, "not_found", param="model", code="model_not_found")


def unauthorized() -> ApiError:
    """A missing or wrong API key."""
    return ApiError(
        401,
        "the request needs the server's API key: Authorization: Bearer KEY",
        "unauthorized",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def late_body() -> ApiError:
    """A body that is too slow; closes the connection."""
    message, headers = "The request's body did not arrive in time", {"connection": "close"}
    return ApiError(408, message, "timeout", headers=headers, plain=True)


def forbidden(message: str) -> ApiError:
    """A request that this server does not allow."""
    return ApiError(403, message, "forbidden", code="forbidden")


def engine_gone(cause: str) -> ApiError:
    """The engine is unavailable, and may be restarting."""
    return _unavailable(cause, "generation", 5)


def tokenizer(message: str, param: str | None = None) -> ApiError:
    """The model's tokenizer failed on a text."""
    text = f"Tokenizer error: {message}"
    return ApiError(422, text, "tokenizer_error", param=param, code="invalid_value")


def template(message: str) -> ApiError:
    """The chat template is missing, or rejects the conversation."""
    text = f"Template error: {message}"
    return ApiError(422, text, "template_error", param="messages", code="invalid_value")


def overloaded(retry_after: int) -> ApiError:
    """Too many requests in flight; ``retry_after`` in seconds."""
    return ApiError(
        429,
        "Model is overloaded",
        "overloaded",
        code="rate_limit_exceeded",
        openai_message=f"Model is overloaded: please try again in {retry_after}s",
        headers={"retry-after": str(retry_after)},
    )


def draining(retry_after: int) -> ApiError:
    """The server is shutting down; ``retry_after`` in seconds."""
    return _unavailable(
        "Model is overloaded: the server is shutting down", "overloaded", retry_after
    )


def _unavailable(message: str, error_type: str, retry_after: int) -> ApiError:
    headers = {"retry-after": str(retry_after)}
    return ApiError(503, message, error_type, code="service_unavailable", headers=headers)


def generation_failed(cause: str) -> ApiError:
    """The engine failed or is gone."""
    return ApiError(424, f"Request failed during generation: {cause}", "generation")


def timed_out(cause: str) -> ApiError:
    """The client's timeout has expired."""
    return ApiError(504, f"Request timed out: {cause}", "timeout", code="timeout")


def incomplete() -> ApiError:
    """The stream of tokens ended without a reason."""
    return ApiError(500, "Incomplete generation", "incomplete_generation")


def internal() -> ApiError:
    """An unexpected exception, whose traceback is in the log."""
    return ApiError(500, "Internal server error", "internal")


def tgi_body(error: ApiError) -> bytes:
    """The JSON object of TGI's routes and their streams."""
    return msgspec.json.encode({"error": error.message, "error_type": error.error_type})


def openai_body(error: ApiError) -> bytes:
    """The JSON object of OpenAI's routes and their streams."""
    details = {
        "message": error.openai_message,
        "type": error.openai_type,
        "param": error.param,
        "code": error.code,
    }
    return msgspec.json.encode({"error": details, "error_type": error.error_type})


def openai_status(status: int) -> int:
    """Translate a status of TGI's routes for OpenAI's."""
    return _OPENAI_STATUSES.get(status, status)


def is_openai(path: str, route: str = "") -> bool:
    """Whether errors of the path, or of the route with this name, have OpenAI's form."""
    if route in _VERTEX_ROUTES:
        return False
    return path in _OPENAI_PATHS or path.startswith(_OPENAI_PREFIXES)


def error_response(scope: Scope, error: ApiError) -> Response:
    """The error in the form of the API that the request's path belongs to."""
    path = scope["path"]
    status, media_type = error.status, "application/json"
    if is_openai(path, getattr(scope.get("route"), "name", "")):
        if path in _RESPONSES and not error.keep_names:
            error = _with_names_of_responses(error)
        body, status = openai_body(error), openai_status(status)
    elif error.plain:
        body, media_type = error.message.encode(), "text/plain"
    else:
        body = tgi_body(error)
    return Response(body, status, headers=error.headers, media_type=media_type)


def _with_names_of_responses(error: ApiError) -> ApiError:
    message = error.openai_message
    for name, own in _RESPONSES_NAMES.items():
        message = message.replace(f"`{name}`", f"`{own}`")
    param = _RESPONSES_NAMES.get(error.param or "", error.param)
    return replace(error, openai_message=message, param=param)
