"""Images from URLs, fetched so that a stranger's URL reaches only what it may.

Known attacks, and what is done against each:

- another reading of the URL by the check than by the client: it is parsed once, and that object is
  fetched;
- names that resolve to internal addresses, or to others at the second time (DNS rebinding): a name
  is resolved once, all its addresses are judged, and one of them is dialled, with the name in
  ``Host`` and in TLS;
- redirects to either: none is followed automatically, and each is judged as the first URL was;
- proxies, netrc files and cookies: none is used;
- servers that send slowly, without end, compressed, in tiny pieces, or much before an answer: there
  is one deadline for all, bytes are counted as they arrive, and compressed answers are refused;
- names whose servers answer slowly, or never: their threads do nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import cache, partial
from ipaddress import IPv6Address
from typing import cast

import httpcore
import httpx

from tgi_cli.version import __version__
from tgi_cli.vision.addresses import may_be_dialled
from tgi_cli.vision.bounded_connection import BoundedBackend
from tgi_cli.vision.errors import MediaError, bad_url, not_fetched, too_many_bytes, unreadable
from tgi_cli.vision.limits import ImageLimits, parse_domain
from tgi_cli.vision.local_files import read_file_url
from tgi_cli.vision.urls import decode_data_url, parse_url

logger = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host name; raises OSError."""

MAX_REDIRECTS = 3
_AT_ONCE = 8
"""Fetches in progress."""
_MAX_ADDRESSES = 4
"""Addresses of a name that are dialled in turn."""
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_INLINE_CHARACTERS = 64 << 10
"""Longest ``data:`` URL that is decoded on the event loop: 0.1 ms."""
_SCHEME_CHARACTERS = 8
_FREE_PIECES = 1024
_PIECE_BYTES = 256
"""Mean size of further pieces. A piece of one byte costs 15 us of the event loop, and memory."""
_HEADERS = (
    (b"accept", b"image/png, image/jpeg, image/webp, image/gif, image/tiff, */*;q=0.1"),
    (b"accept-encoding", b"identity"),
    (b"connection", b"close"),
    (b"user-agent", f"tgi/{__version__}".encode()),
)


@cache
def _resolvers() -> ThreadPoolExecutor:
    """Threads of their own: a name may take the system's resolver half a minute, and no work of
    other requests should wait for that."""
    return ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="resolve")


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host name, by the system's resolver. Raises OSError."""
    ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_resolvers(), ask)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class MediaFetcher:
    """Gets the bytes of images: from ``data:`` URLs, and where it is allowed from others.

    Args:
        resolve: Resolves host names.
    """

    def __init__(self, limits: ImageLimits, resolve: Resolve = resolve) -> None:
        self._limits = limits
        self._resolve = resolve
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._context: ssl.SSLContext | None = None
        self._ports: dict[str, set[int]] = {}
        """Allowed ports of allowed hosts."""
        for host, port in map(parse_domain, limits.allowed_media_domains):
            ports = self._ports.setdefault(host, set())
            ports.update(_PORTS.values() if port is None else (port,))

    async def fetch(self, source: str | bytes) -> bytes:
        """The bytes of an image; ``source`` is a URL or the bytes themselves.

        Raises:
            MediaError: It is invalid, too large, not allowed, or cannot be fetched.
        """
        most = self._limits.max_image_fetch_size
        if isinstance(source, bytes):
            if not source:
                raise unreadable("it is empty", "empty_image_file")
            if len(source) > most:
                raise too_many_bytes(len(source), most)
            return source
        scheme = source[:_SCHEME_CHARACTERS].partition(":")[0].lower()
        if scheme == "data":
            if len(source) <= _INLINE_CHARACTERS:
                return decode_data_url(source, most)
            return await asyncio.to_thread(decode_data_url, source, most)
        if scheme == "file" and self._limits.allowed_local_media_path is not None:
            root = self._limits.allowed_local_media_path
            return await asyncio.to_thread(read_file_url, source, root, most)
        if scheme not in _PORTS:
            raise bad_url("its URL must begin with data:, http: or https:")
        if not self._limits.fetches:
            raise not_fetched(
                "this server fetches no URLs (--media-fetch), send a data: URL instead"
            )
        return await self._fetch(parse_url(source))

    async def _fetch(self, url: httpx.URL) -> bytes:
        seconds = self._limits.media_fetch_timeout
        try:
            async with asyncio.timeout(seconds):
                await self._slots.acquire()
        except TimeoutError:
            raise MediaError(
                "Could not fetch image: too many images are being fetched", unavailable=True
            ) from None
        try:
            async with asyncio.timeout(seconds):
                return await self._follow(url, asyncio.get_running_loop().time() + seconds)
        except TimeoutError:
            raise not_fetched(f"it took more than {seconds:g} s") from None
        except MediaError:
            raise
        except Exception as error:  # a strange server must not be an error of ours
            logger.debug("fetching an image", exc_info=error)
            raise not_fetched("the connection failed") from None
        finally:
            self._slots.release()

    async def _follow(self, url: httpx.URL, until: float) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            found = await self._get(url, until)
            if isinstance(found, bytes):
                return found
            url = found
        raise not_fetched(f"it has more than {MAX_REDIRECTS} redirects")

    async def _get(self, url: httpx.URL, until: float) -> bytes | httpx.URL:
        """The body of an answer, or where it redirects to."""
        addresses = await self._addresses(url)
        if self._context is None:
            # Certificates of authorities: SSL_CERT_FILE, SSL_CERT_DIR, or certifi's.
            self._context = await asyncio.to_thread(httpx.create_ssl_context)
        for index, address in enumerate(addresses):
            left = until - asyncio.get_running_loop().time()
            request = httpcore.Request(
                "GET",
                httpcore.URL(
                    scheme=url.raw_scheme,
                    host=address.encode("ascii"),
                    port=url.port,
                    target=url.raw_path,
                ),
                headers=[(b"host", url.netloc), *_HEADERS],
                extensions={
                    "sni_hostname": url.raw_host.decode("ascii"),
                    "timeout": {"connect": max(left, 0.0) / (len(addresses) - index)},
                },
            )
            # A pool of its own: a kept connection could have been made for another name.
            backend = BoundedBackend()
            async with httpcore.AsyncConnectionPool(
                ssl_context=self._context, network_backend=backend
            ) as pool:
                try:
                    answer = await pool.handle_async_request(request)
                except (httpcore.ConnectError, httpcore.ConnectTimeout):
                    continue
                backend.left = None
                try:
                    return await self._read(url, answer)
                finally:
                    await answer.aclose()
        raise not_fetched("the server cannot be reached")

    async def _addresses(self, url: httpx.URL) -> Sequence[str]:
        """The addresses to dial for a URL, all of them judged."""
        host = url.raw_host.decode("ascii")
        port = url.port or _PORTS[url.scheme]
        listed = str(IPv6Address(host)) if ":" in host else host
        if self._ports and listed not in self._ports:
            raise not_fetched("its host is not among the allowed ones (--allowed-media-domains)")
        if port not in self._ports.get(listed, _PORTS.values()):
            raise not_fetched("its port is not allowed")
        try:
            found = await self._resolve(host, port)
        except (OSError, ValueError):
            found = ()
        if not found:
            raise not_fetched("its host cannot be resolved")
        private = self._limits.allow_private_media
        if not all(may_be_dialled(address, private) for address in found):
            raise not_fetched("its host has an address that is not allowed")
        return found[:_MAX_ADDRESSES]

    async def _read(self, url: httpx.URL, answer: httpcore.Response) -> bytes | httpx.URL:
        headers = httpx.Headers(answer.headers)
        location = headers.get("location")
        if answer.status in _REDIRECTS and location is not None:
            return parse_url(location, url)
        if answer.status != 200:
            raise not_fetched(f"its server answered with status {answer.status}")
        if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
            raise not_fetched("its server sent it compressed")
        most = self._limits.max_image_fetch_size
        declared = headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > most:
            raise too_many_bytes(int(declared[:20]), most)
        body = bytearray()
        count = 0
        async with aclosing(cast("AsyncGenerator[bytes, None]", answer.aiter_stream())) as pieces:
            async for piece in pieces:
                body += piece
                count += 1
                if len(body) > most:
                    raise too_many_bytes(None, most)
                if count > _FREE_PIECES + len(body) // _PIECE_BYTES:
                    raise not_fetched("its server sends it in too small pieces")
                await asyncio.sleep(0)  # several pieces may have been received at once
        if not body:
            raise unreadable("it is empty", "empty_image_file")
        return bytes(body)
