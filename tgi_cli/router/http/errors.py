"""Every error of the HTTP face: its statuses, its words, and its two bodies.

Native routes answer as TGI: ``{"error": TEXT, "error_type": TYPE}``, and plain text where TGI's
web framework answered by itself. OpenAI's routes answer as OpenAI
(https://platform.openai.com/docs/guides/error-codes), with ``error_type`` on top: 400 where TGI
says 422, so that clients raise ``BadRequestError``, and 500 where TGI says 424, which OpenAI's
clients take for a failure of the server and try again. Which of the two an error becomes is
decided by the path when it is written; what raises it need not know.
"""

from __future__ import annotations

from collections.abc import Mapping

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
"""Names of routes whose paths Vertex AI chooses: it calls /v1/endpoints/..., in TGI's form."""
_RESPONSES = ("/v1/responses", "/responses")
_RESPONSES_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""What a request for a response calls the parameters of the chat that it is read as."""

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
        status: of the HTTP response, in TGI's form.
        message: the whole text, prefix included, in TGI's form.
        error_type: TGI's word for the kind of error.
        param, code: OpenAI's: the parameter at fault; a word for programs.
        openai_message: the text in OpenAI's form.
        names_kept: its names are the request's own, also where a response is read as a chat.
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
        openai_message: str | None = None,
        headers: Mapping[str, str] | None = None,
        plain: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.error_type = error_type
        self.param = param
        self.code = code
        self.names_kept = False
        self.openai_message = message if openai_message is None else openai_message
        self.headers = dict(headers or {})
        self.plain = plain

    @property
    def openai_status(self) -> int:
        """Of the HTTP response, in OpenAI's form."""
        return _OPENAI_STATUSES.get(self.status, self.status)

    @property
    def openai_type(self) -> str:
        """OpenAI's kind of error; 429 is of the kind whose limit was reached."""
        if self.status == 429:
            return "requests"
        return "invalid_request_error" if self.openai_status < 500 else "server_error"

    @property
    def response_code(self) -> str:
        """``error.code`` of a response that failed, one of those that OpenAI lists."""
        if self.code in ("rate_limit_exceeded", "context_length_exceeded"):
            return self.code
        return "invalid_prompt" if self.openai_status < 500 else "server_error"

    @property
    def failure_label(self) -> str:
        """The ``err`` label of ``tgi_request_failure``."""
        return _FAILURE_LABELS.get(self.error_type, "validation")


class ClientDisconnected(Exception):
    """The client closed the connection; nobody reads an answer."""


def validation(
    message: str,
    param: str | None = None,
    code: str = "invalid_value",
    openai_message: str | None = None,
) -> ApiError:
    """A parameter that cannot be. OpenAI's form has no prefix, and perhaps words of its own."""
    return ApiError(
        422,
        f"Input validation error: {message}",
        "validation",
        param=param,
        code=code,
        openai_message=message if openai_message is None else openai_message,
    )


def unsupported(
    param: str, what: str | None = None, code: str = "unsupported_parameter"
) -> ApiError:
    """A known parameter that this server cannot act on: refused, never ignored.

    ``what`` says which values of it, with ``code`` ``unsupported_value``; None: all of them.
    """
    return validation(f"{what or f'`{param}`'} is not supported by this server", param, code)


def context_length(
    message: str, param: str, *, context: int, most: int, prompt: int, completion: int | None
) -> ApiError:
    """More tokens than the context holds.

    Agents read OpenAI's code and words, and shorten the conversation.

    Args:
        message: in TGI's form.
        param: what the prompt was made of.
        context, most: tokens of prompt and completion together, and of a prompt.
        prompt, completion: tokens of the request; completion None: the prompt alone is too long.
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


def tokenizer(message: str, param: str | None = None) -> ApiError:
    """The model's tokenizer fails on a text."""
    return ApiError(
        422, f"Tokenizer error: {message}", "tokenizer_error", param=param, code="invalid_value"
    )


def template(message: str) -> ApiError:
    """The chat template refused the conversation, or there is none."""
    return ApiError(
        422,
        f"Template error: {message}",
        "template_error",
        param="messages",
        code="invalid_value",
    )


def overloaded(retry_after: int) -> ApiError:
    """More requests in flight than allowed; ``retry_after`` in seconds."""
    return ApiError(
        429,
        "Model is overloaded",
        "overloaded",
        code="rate_limit_exceeded",
        openai_message=f"Model is overloaded: please try again in {retry_after}s",
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


def tgi_body(error: ApiError) -> bytes:
    """The JSON object of native routes and their streams."""
    return msgspec.json.encode({"error": error.message, "error_type": error.error_type})


def openai_body(error: ApiError) -> bytes:
    """The JSON object of OpenAI's routes and their streams."""
    return _openai_body(error, error.openai_message, error.param)


def _openai_body(error: ApiError, message: str, param: str | None) -> bytes:
    return msgspec.json.encode(
        {
            "error": {
                "message": message,
                "type": error.openai_type,
                "param": param,
                "code": error.code,
            },
            "error_type": error.error_type,
        }
    )


def openai_status(status: int) -> int:
    """What OpenAI's routes answer where TGI's answer ``status``."""
    return _OPENAI_STATUSES.get(status, status)


def is_openai(path: str, route: str = "") -> bool:
    """Whether errors of the path have OpenAI's form; ``route`` is the name of the route there."""
    if route in _VERTEX_ROUTES:
        return False
    return path in _OPENAI_PATHS or path.startswith(_OPENAI_PREFIXES)


def error_response(scope: Scope, error: ApiError) -> Response:
    """The error in the form of the API that the path of the request belongs to."""
    path = scope["path"]
    if is_openai(path, getattr(scope.get("route"), "name", "")):
        message, param = error.openai_message, error.param
        if path in _RESPONSES and not error.names_kept:
            for name, own in _RESPONSES_NAMES.items():
                message = message.replace(f"`{name}`", f"`{own}`")
            param = _RESPONSES_NAMES.get(param, param) if param else param
        body = _openai_body(error, message, param)
        return Response(
            body, error.openai_status, headers=error.headers, media_type="application/json"
        )
    if error.plain:
        body, media_type = error.message.encode(), "text/plain"
    else:
        body, media_type = tgi_body(error), "application/json"
    return Response(body, error.status, headers=error.headers, media_type=media_type)
