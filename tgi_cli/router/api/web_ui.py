"""The web UI: the page at ``GET /`` for browsers, and its assets below ``/web-ui/``.

The page loads nothing from other hosts. Its assets need no API key, as a browser sends none for
scripts; the requests that they make do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tgi_cli.router.api.service import HEALTH, SERVICE, health
from tgi_cli.router.http.endpoint import Endpoint, Operation, RequestContext

_PAGE = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}
_HEADERS = {
    # Names of assets do not change with their content: a browser asks whether it has the latest.
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the web UI; ``etag`` is quoted (RFC 9110, section 8.8.3)."""

    content: bytes
    media_type: str
    etag: str


@cache
def assets() -> dict[str, Asset]:
    """All files by their path below the folder of the web UI, such as ``vendor/purify.min.js``."""
    found = {}
    for path, file in _files(files("tgi_cli.router") / "web_ui"):
        content = file.read_bytes()
        media_type = _MEDIA_TYPES[f".{path.rpartition('.')[2]}"]
        found[path] = Asset(content, media_type, f'"{sha256(content).hexdigest()[:32]}"')
    return found


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for each in folder.iterdir():
        if each.is_dir():
            yield from _files(each, f"{prefix}{each.name}/")
        else:
            yield f"{prefix}{each.name}", each


def _respond(request: Request, asset: Asset, headers: dict[str, str]) -> Response:
    """The asset, or 304 if the client has it (RFC 9110, section 13.1.2)."""
    headers = {**_HEADERS, **headers, "etag": asset.etag}
    known = request.headers.get("if-none-match", "")
    if known.strip() == "*" or asset.etag in (
        tag.strip().removeprefix("W/") for tag in known.split(",")
    ):
        return Response(status_code=304, headers=headers)
    return Response(asset.content, headers=headers, media_type=asset.media_type)


def accepts_html(accept: str) -> bool:
    """Whether an Accept header names ``text/html``, as those of browsers do.

    Wildcards do not count: clients and probes that send ``*/*`` or nothing get what TGI answers.
    """
    for part in accept.lower().split(","):
        media_type, *parameters = (each.strip() for each in part.split(";"))
        if media_type == "text/html":
            weights = [each.partition("=")[2] for each in parameters if each.startswith("q=")]
            return not weights or weights[0].strip("0.") != ""
    return False


async def root(context: RequestContext[None]) -> Response:
    """The web UI for browsers (``Accept: text/html``); for others as ``/health``.

    HEAD from others asks only whether the address answers.
    """
    request = context.request
    enabled = not context.state.config.disable_web_ui
    if enabled and accepts_html(request.headers.get("accept", "")):
        return _respond(request, assets()[_PAGE], {"vary": "accept"})
    answer = Response() if request.method == "HEAD" else await health(context)
    if enabled:
        answer.headers["vary"] = "accept"
    return answer


async def asset(context: RequestContext[None]) -> Response:
    """A file of the web UI."""
    name = context.request.path_params["name"]
    found = None if context.state.config.disable_web_ui else assets().get(name)
    if found is None or name == _PAGE:
        raise HTTPException(404)
    return _respond(context.request, found, {})


_ASSET = Operation(
    tag=SERVICE.tag, answer=(str,), media_type="text/javascript", errors=(404,), public=True
)

ROUTES = [
    Endpoint("/", root, replace(HEALTH, answer=(str,), media_type="text/html"), method="GET"),
    Endpoint("/web-ui/{name:path}", asset, _ASSET, method="GET"),
]
