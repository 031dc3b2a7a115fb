"""Asks a server with OpenAI's API for its models and for answers."""

from __future__ import annotations

import asyncio
import email.utils
import ipaddress
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from tgi_cli.chat.conversation import has_images
from tgi_cli.chat.errors import ChatInputError, ChatServerError, error_message
from tgi_cli.chat.stream_parser import AnswerPart, ChatStreamParser, read_answer

_CONNECT_SECONDS = 10.0
_BUSY = (429, 503)
_TRIES = 4
"""Attempts while the server is busy."""
_MAX_PAUSE = 60.0
"""Longest Retry-After that is waited for, in seconds."""
_CHATS = "/chat/completions"
_HOST_AND_PORT = re.compile(r"(localhost|[\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}(/.*)?")
_ABOUT_IMAGES = re.compile("image|vision|multi-?modal|content", re.IGNORECASE)
"""What servers write of when a model takes no images; some only that content is not a string."""

OnPause = Callable[[float, ChatServerError], None]
"""Called before a pause of so many seconds, with its reason."""

_NAMES_OF_OWNERS: dict[str, dict[str, str | None]] = {
    "llamacpp": {
        "repetition_penalty": "repeat_penalty",
        "thinking_token_budget": "thinking_budget_tokens",
    }
}
"""Servers' own names of parameters, by ``owned_by`` of their models."""


def as_url(target: str) -> str | None:
    """The URL that a target is, or None for a model; ``localhost:3000`` is one without scheme."""
    if target.startswith(("http://", "https://")):
        return target
    return f"http://{target}" if _HOST_AND_PORT.fullmatch(target) else None


class ChatClient:
    """A client of one server; an asynchronous context manager.

    Args:
        url: the server's URL, with or without ``/v1`` or ``/v1/chat/completions``.
        api_key: sent as a bearer token; empty: none.
        timeout: seconds to wait for the next bytes of an answer.

    Raises:
        ChatInputError: ``url`` is not the URL of a server.
    """

    def __init__(self, url: str, api_key: str = "", timeout: float = 600.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ChatInputError(f"{url!r} is not the URL of a server", "give http://HOST:PORT")
        self._given = url.rstrip("/").removesuffix(_CHATS)
        self._base = self._given
        if not re.search(r"/v\d\w*$", urlsplit(self._given).path):
            self._base = f"{self._given}/v1"
        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout, connect=_CONNECT_SECONDS),
            trust_env=not _is_loopback(parts.hostname),  # proxies are for other machines
            follow_redirects=True,
        )
        self._renamed: dict[str, str | None] = {}
        """Fields that this server wants under another name, or not at all."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._http.aclose()

    @property
    def url(self) -> str:
        """The base URL of OpenAI's routes."""
        return self._base

    async def models(
        self,
        *,
        adapters: bool = False,
        on_pause: OnPause = lambda seconds, error: None,
    ) -> list[str]:
        """The names of the models that the server lists, and of adapters if they are wanted.

        A server that is busy, such as one that loads its model, is asked again.

        Args:
            on_pause: called before each pause.

        Raises:
            ChatServerError: the server is unavailable, fails, or refuses the key.
        """
        response = await self._get_models()
        attempt = 1
        while response.status_code in _BUSY:
            await _wait(_refusal(response, self._base), attempt, on_pause)
            response = await self._get_models()
            attempt += 1
        if response.status_code == 404 and self._base != self._given:
            # Such as https://host/openai, whose routes have no /v1.
            beside = await self._get_models(self._given)
            if beside.status_code == 200 and _cards(beside):
                self._base, response = self._given, beside
        if response.status_code in (401, 403) or response.status_code >= 500:
            raise _refusal(response, self._base)
        cards = _cards(response) if response.status_code == 200 else []
        for card in cards:
            self._renamed |= _NAMES_OF_OWNERS.get(str(card.get("owned_by")), {})
        # Adapters name their base as parent.
        return [card["id"] for card in cards if adapters or not card.get("parent")]

    async def answer(
        self, body: dict[str, Any], on_pause: OnPause
    ) -> AsyncGenerator[AnswerPart, None]:
        """Request an answer and yield its parts as they arrive.

        A server that is busy (429, 503) is asked again, after the pause that it asks for.

        Args:
            body: the request, without the fields of streaming.
            on_pause: called before each pause.

        Raises:
            ChatServerError: the server is unavailable, refuses the request, fails while it
                answers, or ends the stream before the answer is complete.
        """
        wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
        for attempt in range(1, _TRIES + 1):
            try:
                async with aclosing(self._stream(wanted)) as parts:
                    async for part in parts:
                        yield part
                return
            except ChatServerError as error:
                await _wait(error, attempt, on_pause)

    async def _stream(self, wanted: dict[str, Any]) -> AsyncGenerator[AnswerPart, None]:
        while True:
            names = {name: self._renamed.get(name, name) for name in wanted}
            body = {new: wanted[name] for name, new in names.items() if new is not None}
            async with self._sending("POST", _CHATS, body) as response:
                if response.status_code == 200:
                    async with aclosing(_parts(response)) as parts:
                        async for part in parts:
                            yield part
                    return
                await response.aread()
                error = _refusal(response, self._base, images=has_images(wanted["messages"]))
            if not self._adapt(body, error):
                raise error

    def _adapt(self, body: dict[str, Any], error: ChatServerError) -> bool:
        """Whether to ask again, without or with another name for a field that was refused."""
        if error.status not in (400, 422):
            return False
        replaced: dict[str, str | None] = {}
        if "stream_options" in error.message:
            replaced["stream_options"] = None
        elif "max_completion_tokens" in error.message:
            replaced["max_tokens"] = "max_completion_tokens"
        found = {name: new for name, new in replaced.items() if name in body}
        self._renamed |= found
        return bool(found)

    def _sending(self, method: str, route: str, body: dict[str, Any]) -> _Exchange:
        return _Exchange(self._http, method, self._base + route, body)

    async def _get_models(self, base: str = "") -> httpx.Response:
        try:
            return await self._http.get(f"{base or self._base}/models", timeout=_CONNECT_SECONDS)
        except httpx.HTTPError as error:
            raise _unavailable(self._given, error) from None


class _Exchange:
    """A request and its response, as a context manager that raises ChatServerError."""

    def __init__(
        self, client: httpx.AsyncClient, method: str, url: str, body: dict[str, Any]
    ) -> None:
        self._stream = client.stream(method, url, json=body)
        self._url = url
        self._headed = False

    async def __aenter__(self) -> httpx.Response:
        try:
            return await self._stream.__aenter__()
        except httpx.HTTPError as error:
            raise _unavailable(self._url, error) from None

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._stream.__aexit__(*exc_info)
        if isinstance(exc_info[1], httpx.HTTPError):
            reason = str(exc_info[1]) or type(exc_info[1]).__name__
            if isinstance(exc_info[1], httpx.ReadTimeout):
                reason = "it has sent nothing for too long"
            raise ChatServerError(
                f"the server was lost while it answered: {reason}", "/retry asks again"
            ) from None


async def _wait(error: ChatServerError, attempt: int, on_pause: OnPause) -> None:
    """Pause before the next attempt. Raises ``error`` if there is none."""
    pause = 2.0 ** (attempt - 1) if error.retry_after is None else error.retry_after
    if error.status not in _BUSY or attempt == _TRIES or pause > _MAX_PAUSE:
        raise error
    on_pause(pause, error)
    await asyncio.sleep(pause)


async def _parts(response: httpx.Response) -> AsyncGenerator[AnswerPart, None]:
    """The parts of a response with status 200."""
    kind = response.headers.get("content-type", "")
    if not kind.startswith("text/event-stream"):
        try:
            whole = httpx.Response(200, content=await response.aread()).json()
        except ValueError:
            raise ChatServerError(
                f"the server returned {kind or 'an untyped body'} instead of an answer",
                "check the URL",
            ) from None
        yield read_answer(whole)
        return
    parser = ChatStreamParser()
    async for data in response.aiter_bytes():
        for part in parser.push(data):
            yield part
    for part in parser.finish():
        yield part
    if not parser.complete:
        raise ChatServerError("the server ended the answer early", "/retry asks again")


def _cards(response: httpx.Response) -> list[dict[str, Any]]:
    try:
        body = response.json()
    except ValueError:
        return []
    data = body.get("data") if isinstance(body, dict) else None
    return [
        card
        for card in (data if isinstance(data, list) else [])
        if isinstance(card, dict) and isinstance(card.get("id"), str)
    ]


def _unavailable(url: str, error: httpx.HTTPError) -> ChatServerError:
    reason = str(error) or type(error).__name__
    return ChatServerError(f"{url} is unavailable: {reason}", "is a server running there?")


def _refusal(response: httpx.Response, base: str, images: bool = False) -> ChatServerError:
    """The error that a status other than 200 stands for."""
    status = response.status_code
    try:
        message = error_message(response.json())
    except ValueError:
        message = ""
    cause, remedy = message or f"{base} returned status {status}", ""
    words = f": {message}" if message else ""
    if status in (401, 403):
        cause = f"{base} refuses the request with status {status}{words}"
        remedy = "give its API key: --api-key, or the variable TGI_API_KEY"
    elif status == 404:
        cause = message or f"{base} has no chat completions"
        remedy = "/model lists the models" if message else "check the URL"
    elif status in _BUSY:
        cause = f"the server is busy (status {status}){words}"
        remedy = "try again later"
    elif status == 413 and images:
        remedy = "send a smaller image"
    elif images and _ABOUT_IMAGES.search(message):
        remedy = "images need a vision-language model, such as Qwen3-VL or SmolVLM"
    return ChatServerError(
        cause, remedy, status=status, message=message, retry_after=_retry_after(response)
    )


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds of the header Retry-After, which has seconds or a date (RFC 9110, 10.2.3)."""
    value = response.headers.get("retry-after", "")
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", value):
        return float(value)
    try:
        when = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(when.timestamp() - time.time(), 0.0)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
