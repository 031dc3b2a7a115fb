"""The web UI over HTTP: who gets it, its headers, its files. Its scripts run in
tests/system/test_web_ui.py."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any

import httpx
import pytest
from hatchling.builders.wheel import WheelBuilder

import tgi_cli
from tests.router.fakes import FakeEngine
from tgi_cli.router.api.web_ui import accepts_html, assets

BROWSER = {
    "accept": "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8",
    "sec-fetch-mode": "navigate",
}
OTHERS = ("*/*", "application/json", "text/plain", "text/*", "text/html;q=0", "")
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
OWN = sorted(path for path in assets() if not path.startswith("vendor/"))


async def test_browsers_get_the_page(client: httpx.AsyncClient) -> None:
    answer = await client.get("/", headers=BROWSER)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.content == assets()["index.html"].content
    assert answer.headers["vary"].startswith("accept,"), "a cache must not give it to other clients"


@pytest.mark.parametrize("accept", OTHERS)
async def test_other_clients_get_the_servers_health(
    client: httpx.AsyncClient, engine: FakeEngine, accept: str
) -> None:
    headers = {"accept": accept} if accept else {}
    answer = await client.get("/", headers=headers)
    assert (answer.status_code, answer.content) == (200, b"")
    engine.is_healthy = False
    assert (await client.get("/", headers=headers)).status_code == 503
    assert (await client.head("/", headers=headers)).status_code == 200


async def test_page_is_served_while_the_engine_is_down(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.is_healthy = False
    assert (await client.get("/", headers=BROWSER)).status_code == 200


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("text/html", True),
        ("TEXT/HTML ; q=0.5", True),
        ("application/json, text/html;level=1;q=0.1", True),
        ("text/html;q=0.000", False),
        ("text/htmlx", False),
        ("application/xhtml+xml", False),
        ("", False),
    ],
)
def test_accept_headers(accept: str, expected: bool) -> None:
    assert accepts_html(accept) is expected


@pytest.mark.parametrize(
    "path", ["/", "/web-ui/app.js", "/web-ui/css/base.css", "/web-ui/icon.svg"]
)
async def test_headers_forbid_what_the_page_does_not_need(
    client: httpx.AsyncClient, path: str
) -> None:
    headers = (await client.get(path, headers=BROWSER)).headers
    policy = dict(
        directive.strip().partition(" ")[::2]
        for directive in headers["content-security-policy"].split(";")
    )
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "dompurify",
    }
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("path", ["/", "/web-ui/app.js"])
async def test_head_and_conditional_requests(client: httpx.AsyncClient, path: str) -> None:
    whole = await client.get(path, headers=BROWSER)
    head = await client.head(path, headers=BROWSER)
    assert (head.status_code, head.headers["etag"]) == (200, whole.headers["etag"])
    assert head.headers["content-length"] == whole.headers["content-length"]
    assert whole.headers["cache-control"] == "no-cache"
    for known in (whole.headers["etag"], f'"x", W/{whole.headers["etag"]}', "*"):
        again = await client.get(path, headers=BROWSER | {"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == whole.headers["etag"]
    other = await client.get(path, headers=BROWSER | {"if-none-match": '"other"'})
    assert other.status_code == 200


async def test_every_file_is_served_with_its_type(client: httpx.AsyncClient) -> None:
    for path, asset in assets().items():
        if path == "index.html":
            continue
        answer = await client.get(f"/web-ui/{path}")
        assert answer.content == asset.content, path
        expected = TYPES.get(path.rpartition(".")[2], "text/plain")
        assert answer.headers["content-type"].startswith(expected), path


@pytest.mark.parametrize(
    "path",
    ["", "nothing.js", "index.html", "../app.py", "..%2Fapp.py", "%2e%2e/app.py", "vendor",
     "vendor/", "vendor%2F..%2Fapp.js", "css//base.css", "app.js/", "app.js%00"],
)  # fmt: skip
async def test_other_paths_are_404(client: httpx.AsyncClient, path: str) -> None:
    url = httpx.URL("http://router/web-ui/").copy_with(raw_path=f"/web-ui/{path}".encode())
    answer = await client.get(url, headers=BROWSER)
    assert answer.status_code == 404
    assert answer.json()["error_type"] == "not_found"


async def test_post_remains_tgis(client: httpx.AsyncClient) -> None:
    answer = await client.post("/", json={"inputs": "hello"}, headers=BROWSER)
    assert answer.status_code == 200
    assert "generated_text" in answer.json()[0]


class TestDisabled:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"disable_web_ui": True}

    async def test_nothing_of_it_is_served(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        answer = await client.get("/", headers=BROWSER)
        assert (answer.status_code, answer.content) == (200, b"")
        assert "content-security-policy" not in answer.headers
        assert (await client.get("/web-ui/app.js")).status_code == 404
        engine.is_healthy = False
        assert (await client.get("/", headers=BROWSER)).status_code == 503


class TestWithKey:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"api_key": "s3cret"}

    async def test_page_needs_no_key_but_its_requests_do(self, client: httpx.AsyncClient) -> None:
        assert (await client.get("/", headers=BROWSER)).status_code == 200
        assert (await client.get("/web-ui/vendor/purify.min.js")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.post("/", json={"inputs": "hello"})).status_code == 401


class _Page(HTMLParser):
    """Collects the URLs of a page, and what a strict policy would block."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.blocked: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.urls += [given[name] or "" for name in ("src", "href") if name in given]
        inline = tag == "style" or (tag == "script" and "src" not in given)
        if inline or any(name == "style" or name.startswith("on") for name in given):
            self.blocked.append(tag)


def test_page_names_files_that_exist_by_relative_urls() -> None:
    page = _Page()
    page.feed(assets()["index.html"].content.decode())
    assert page.blocked == [], "inline scripts and styles"
    urls = [url for url in page.urls if not url.startswith("#")]
    # Below a proxy's prefix, absolute paths would lead elsewhere.
    assert all(re.fullmatch(r"[\w-]+(/[\w.-]+)*", url) for url in urls), urls
    files = {url.removeprefix("web-ui/") for url in urls if url.startswith("web-ui/")}
    assert files <= assets().keys()
    scripts = {path for path in assets() if path.endswith(".js")}
    assert _imported(files & scripts) == scripts, "files that nothing loads"
    assert {path for path in assets() if path.endswith(".css")} <= files


def _imported(paths: set[str]) -> set[str]:
    found: set[str] = set()
    while paths:
        path = paths.pop()
        found.add(path)
        if not path.startswith("vendor/"):
            source = assets()[path].content.decode()
            names = re.findall(r'^(?:import .*|import|\} from) ?"(\.[^"]+)";$', source, re.M)
            paths |= {normpath(join(dirname(path), name)) for name in names} - found
    return found


@pytest.mark.parametrize("path", OWN)
def test_own_files_load_nothing_and_write_no_markup(path: str) -> None:
    source = assets()[path].content.decode()
    comments = r"(?m)^\s*(//|\*|/\*\*?) .*$"
    code = re.sub(comments, "", source).replace("http://www.w3.org/2000/svg", "")
    assert "://" not in code.replace(r"https?:\/\/", ""), "addresses of other hosts"
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                 "new Function", "srcdoc", "@import", "url("):  # fmt: skip
        assert word not in code, word
    assert len(source.splitlines()) < 400


def test_vendored_libraries_are_released_files_with_their_licences() -> None:
    heads = {
        path: asset.content[:400].decode()
        for path, asset in assets().items()
        if path.startswith("vendor/")
    }
    assert "marked v18.2.1" in heads["vendor/marked.esm.js"]
    assert "DOMPurify 3.4.18" in heads["vendor/purify.min.js"]
    assert set(heads) == {
        "vendor/marked.esm.js",
        "vendor/marked.LICENSE",
        "vendor/purify.min.js",
        "vendor/dompurify.LICENSE",
    }


def test_wheel_has_all_files() -> None:
    root = Path(tgi_cli.__file__).parents[1]
    if not (root / "pyproject.toml").exists():
        pytest.skip("the package is installed: its build's configuration is not here")
    files = {file.distribution_path for file in WheelBuilder(str(root)).recurse_included_files()}
    assert {f"tgi_cli/router/web_ui/{path}" for path in assets()} <= files
