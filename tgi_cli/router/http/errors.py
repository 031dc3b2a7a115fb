"""Errors of the HTTP API, independent of the form in which they are written.

Statuses and messages are those of TGI's routes; :mod:`tgi_cli.router.http.error_styles` translates
them for the APIs of other vendors.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

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
        keep_names: the error names parameters as the client did, in every API.
        overflow: tokens of a prompt that is too long, and the most that it may have.
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
    overflow: tuple[int, int] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    plain: bool = False

    def __post_init__(self) -> None:
        self.openai_message = self.openai_message or self.message

    def __str__(self) -> str:
        return self.message

    @property
    def is_servers(self) -> bool:
        """Whether the server is at fault, and not the request. TGI tells a failed generation by a
        status below 500, 424."""
        return self.status >= 500 or self.status == 424

    @property
    def response_code(self) -> str:
        """``error.code`` of a failed response, one of those that OpenAI lists."""
        if self.code in ("rate_limit_exceeded", "context_length_exceeded"):
            return self.code
        return "server_error" if self.is_servers else "invalid_prompt"

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
    message: str,
    param: str,
    *,
    context: int,
    most: int,
    prompt: int,
    completion: int | None,
    longest: int,
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
        longest: longest prompt that this request may have.
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
    error = validation(message, param, "context_length_exceeded", words)
    error.overflow = int(prompt), longest
    return error


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
        "the request needs the server's API key: Authorization: Bearer KEY, or x-api-key: KEY",
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


def no_template() -> ApiError:
    """The model has no chat template, as models that were not trained on conversations."""
    error = template("template not found")
    error.openai_message = (
        "Template error: the model has no chat template (it may be a base model): use "
        "/v1/completions, or start the server with --chat-template"
    )
    return error


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


def model_busy(cause: str, retry_after: int) -> ApiError:
    """The request cannot wait for its model to be loaded; ``retry_after`` in seconds."""
    return _unavailable(f"Model is overloaded: {cause}", "overloaded", max(retry_after, 1))


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
