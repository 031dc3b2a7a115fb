"""Connections to strange servers, on which little is read before an answer begins.

A server may send any number of informational answers before its answer (1xx; RFC 9110, section
15.2). httpcore skips them without a pause as long as there is something to be read: 64 KB of them,
4,000, hold an event loop for a fifth of a second. So connections give a few of their bytes at a
time, and a limited number of them until the answer is there.

https://www.encode.io/httpcore/network-backends/
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from typing import Any

import httpcore

from tgi_cli.vision.errors import not_fetched

MOST_HEAD_BYTES = 32 << 10
"""Before the end of an answer's headers. Most servers and proxies allow 8 to 16 KB."""
_PART = 4 << 10
"""Bytes that are given at once until then."""


class BoundedBackend(httpcore.AsyncNetworkBackend):
    """Connects for one request.

    Attributes:
        left: Bytes that may still be read before an answer; None once it is there.
    """

    def __init__(self) -> None:
        self.left: int | None = MOST_HEAD_BYTES
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        stream = await self._inner.connect_tcp(host, port, timeout, local_address, socket_options)
        return _BoundedStream(stream, self)


class _BoundedStream(httpcore.AsyncNetworkStream):
    def __init__(self, inner: httpcore.AsyncNetworkStream, backend: BoundedBackend) -> None:
        self._inner = inner
        self._backend = backend

    async def read(
        self,
        max_bytes: int,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> bytes:
        """Raises MediaError for a server that sends too much before its answer."""
        if self._backend.left is None:
            return await self._inner.read(max_bytes, timeout)
        await asyncio.sleep(0)  # what was read before has been handled meanwhile
        found = await self._inner.read(min(max_bytes, _PART), timeout)
        self._backend.left -= len(found)
        if self._backend.left < 0:
            raise not_fetched("its server sends too much before it")
        return found

    async def write(
        self,
        buffer: bytes,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> None:
        await self._inner.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore.AsyncNetworkStream:
        inner = await self._inner.start_tls(ssl_context, server_hostname, timeout)
        return _BoundedStream(inner, self._backend)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
