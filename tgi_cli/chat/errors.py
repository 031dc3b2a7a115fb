"""Errors of a chat: of what the user enters, and of the server."""

from __future__ import annotations

from tgi_cli.errors import ExitCode, TgiError


class ChatInputError(TgiError):
    """A command, a file or a value that cannot be used."""

    exit_code = ExitCode.USAGE


class ChatServerError(TgiError):
    """The server is unavailable, refuses a request, or fails while it answers.

    Attributes:
        status: HTTP status, or 0 if there is none.
        message: the server's own words, or an empty string.
        retry_after: seconds after which the server asks to try again, or None.
    """

    def __init__(
        self,
        cause: str,
        remedy: str = "",
        *,
        status: int = 0,
        message: str = "",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(cause, remedy)
        self.status = status
        self.message = message
        self.retry_after = retry_after


def error_message(body: object) -> str:
    """The message in the JSON body of an error, or an empty string.

    OpenAI's ``{"error": {"message": ...}}``, TGI's ``{"error": ...}``, FastAPI's
    ``{"detail": ...}``, and ``{"message": ...}``.
    """
    if isinstance(body, list) and body:  # Gemini's
        body = body[0]
    if isinstance(body, str):
        return body.strip()
    if not isinstance(body, dict):
        return ""
    for name in ("error", "message", "detail"):
        found = error_message(body.get(name))
        if found:
            return found
    return ""
