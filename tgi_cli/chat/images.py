"""Images for messages: read from files or fetched from URLs, and sent within the request.

Every server that takes images takes ``data:`` URLs; few fetch from others.
"""

from __future__ import annotations

import base64
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from tgi_cli.chat.conversation import AttachedImage
from tgi_cli.chat.errors import ChatInputError
from tgi_cli.files import read_bytes
from tgi_cli.process.units import format_size

_MAX_BYTES = 20 << 20
"""OpenAI's limit is 50 MB for a request, Anthropic's 5 MB for an image."""

_FETCH_SECONDS = 30.0

_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
)


async def attach_image(source: str) -> AttachedImage:
    """Read a file, or fetch an ``http:`` or ``https:`` URL.

    Raises:
        ChatInputError: it cannot be read, or is not an image that servers take.
    """
    if source.startswith("data:"):
        return AttachedImage(source, "image", "a data URL")
    parts = urlsplit(source)
    if parts.scheme in ("http", "https"):
        data = await _fetch(source)
        name = unquote(parts.path).rsplit("/", 1)[-1] or parts.netloc
    else:
        data = _read(source.removeprefix("file://"))
        name = source.rsplit("/", 1)[-1]
    kind = _type_of(data)
    if kind is None:
        raise ChatInputError(f"{source} is not a PNG, JPEG, WebP or GIF image")
    encoded = base64.b64encode(data).decode("ascii")
    return AttachedImage(f"data:{kind};base64,{encoded}", name, f"{kind}, {format_size(len(data))}")


def _type_of(data: bytes) -> str | None:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for start, kind in _SIGNATURES if data.startswith(start)), None)


def _read(name: str) -> bytes:
    path = Path(name).expanduser()
    try:
        return read_bytes(path, _MAX_BYTES)
    except OSError as error:
        raise ChatInputError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ChatInputError(f"{path} cannot be sent: {error}") from None


async def _fetch(url: str) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        async with (
            httpx.AsyncClient(follow_redirects=True, timeout=_FETCH_SECONDS) as client,
            client.stream("GET", url) as response,
        ):
            if response.status_code != 200:
                raise ChatInputError(f"{url} returned status {response.status_code}")
            async for part in response.aiter_bytes():
                parts.append(part)
                size += len(part)
                if size > _MAX_BYTES:
                    raise ChatInputError(f"{url} has more than {_MAX_BYTES >> 20} MiB")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ChatInputError(f"{url} cannot be fetched: {error or type(error).__name__}") from None
    return b"".join(parts)
