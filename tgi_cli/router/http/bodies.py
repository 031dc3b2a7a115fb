"""Request bodies, JSON answers, and disconnected clients."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Mapping
from functools import cache
from itertools import accumulate
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tgi_cli.router import bounds
from tgi_cli.router.http.body_errors import invalid_json, wrong_types
from tgi_cli.router.http.errors import ApiError, ClientDisconnected, late_body, overloaded
from tgi_cli.router.http.protocol import body_seconds

T = TypeVar("T")

_JSON = re.compile(r"application/([\w.-]+\+)?json\s*(;.*)?$", re.IGNORECASE)
_CAUSE_CHARACTERS = 500
"""Length limit of the cause in errors about invalid bodies, as it may repeat the body."""
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = [(byte in b"[{") - (byte in b"]}") for byte in range(256)]
"""Change of depth at each byte."""
_RETRY_SECONDS = 1
_encode = msgspec.json.Encoder().encode


class BodyMemory:
    """Bounds the bodies that are in memory at a time, so that many slow clients cannot fill it.

    Attributes:
        most: bytes that all of them may take together.
        taken: bytes that they take.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0

    def take(self, size: int) -> None:
        """Count bytes until :meth:`give_back`. Raises ApiError, 429, if there are too many."""
        if self.taken + size > self.most:
            error = overloaded(_RETRY_SECONDS)
            error.headers["connection"] = "close"  # the rest of the body stays unread
            raise error
        self.taken += size

    def give_back(self, size: int) -> None:
        """The bytes are in memory no longer."""
        self.taken -= size


async def read_body(request: Request, limit: int, memory: BodyMemory) -> bytes:
    """The bytes of a JSON body that holds no more values than allowed.

    ``memory`` counts them while they are read.

    Raises:
        ApiError: 415 wrong content type, 413 too large, 408 too slow, 429 too many bodies at a
            time, 400 too deep, 422 too many values; in plain text on TGI's routes.
        ClientDisconnected: the connection closed within the body.
    """
    if not _JSON.match(request.headers.get("content-type", "")):
        raise ApiError(
            415,
            "Expected request with `Content-Type: application/json`",
            "validation",
            plain=True,
        )
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(
            415,
            f"Expected a body without `Content-Encoding`. Given: {coding[:_CAUSE_CHARACTERS]}",
            "validation",
            headers={"accept-encoding": "identity"},
            plain=True,
        )
    body = await _read_body(request, limit, memory)
    if len(body) > bounds.LARGE_BODY:
        await asyncio.to_thread(check_values, body)
    else:
        check_values(body)
    return body


def check_values(body: bytes) -> None:
    """Refuse JSON with more or deeper values than :mod:`tgi_cli.router.bounds` allows.

    Counts them without decoding, at 2 ns a byte if the text has many brackets or quotes. Leaves
    invalid JSON to the decoder. Raises ApiError: 400 too deep, 422 too many.
    """
    if len(body) > bounds.LARGE_BODY:
        for mark, most in ((b",", bounds.LARGE_BODY // 2), (b"\\", bounds.LARGE_BODY)):
            if body.count(mark) > most:
                raise wrong_types(f"it holds more than {most} times {mark.decode()!r}")
    quotes = body.count(b'"')
    opened = body.count(b"[") + body.count(b"{")
    few_values = body.count(b",") <= bounds.VALUES
    if quotes <= 2 * bounds.STRINGS and opened <= bounds.DEPTH and few_values:
        return
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if body.count(b'"') > 2 * bounds.STRINGS:
        raise wrong_types(f"it holds more than {bounds.STRINGS} strings")
    outside = b"".join(body.split(b'"')[::2])
    if not few_values and outside.count(b",") > bounds.VALUES:
        raise wrong_types(f"it holds more than {bounds.VALUES} values")
    brackets = outside.translate(None, _NO_BRACKETS)
    levels = accumulate(map(_STEPS.__getitem__, brackets[: 2 * bounds.CONTAINERS]))
    if max(levels, default=0) > bounds.DEPTH:
        raise invalid_json(f"its arrays and objects are nested more than {bounds.DEPTH} deep")
    if brackets.count(b"[") + brackets.count(b"{") > bounds.CONTAINERS:
        raise wrong_types(f"it holds more than {bounds.CONTAINERS} arrays and objects")


def parse(body: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Decode JSON. Raises ApiError: 400 if it is not valid, 422 if it has the wrong types."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise wrong_types(str(error)[:_CAUSE_CHARACTERS]) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_json(str(error)) from error


@cache
def _keys(names: tuple[str, ...]) -> type[msgspec.Struct]:
    return msgspec.defstruct("Keys", [(name, msgspec.Raw | UnsetType, UNSET) for name in names])


def first_key(body: bytes | msgspec.Raw, *names: str) -> str | None:
    """The first of ``names`` that the JSON object has, or None. Raises as :func:`parse`."""
    keys = parse(body, _keys(names))
    return next((name for name in names if getattr(keys, name) is not UNSET), None)


async def _read_body(request: Request, limit: int, memory: BodyMemory) -> bytes:
    declared = request.headers.get("content-length", "")
    size = int(declared[:20]) if declared.isascii() and declared.isdigit() else 0
    chunks: list[bytes] = []
    if size <= limit:
        size = taken = 0
        try:
            async with asyncio.timeout(body_seconds(limit)):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > limit:
                        break
                    memory.take(len(chunk))
                    taken = size
                    chunks.append(chunk)
        except TimeoutError:
            raise late_body() from None
        except ClientDisconnect as error:
            raise ClientDisconnected from error
        finally:
            memory.give_back(taken)
    if size > limit:
        # The connection cannot be reused, as the rest of the body stays unread.
        raise ApiError(
            413,
            f"Failed to buffer the request body: length limit exceeded ({limit} bytes)",
            "validation",
            headers={"connection": "close"},
            plain=True,
        )
    return b"".join(chunks)


def json_response(
    content: Any, headers: Mapping[str, str] | None = None, status: int = 200
) -> Response:
    """A JSON response of anything that msgspec encodes."""
    return Response(
        _encode(content), status, headers=dict(headers or {}), media_type="application/json"
    )


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``, but cancel it as soon as the client closes the connection.

    Starlette itself runs handlers that do not stream to their end.

    Raises:
        ClientDisconnected: the client did; ``work`` is cancelled and has ended.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
