"""Images from URLs: what is fetched, from where, and what never is."""

from __future__ import annotations

import asyncio
import base64
import gzip
import socket
import ssl
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import httpcore
import httpx
import pytest

from tests.tools.certificate_authority import Authority
from tests.tools.event_loop_gap import loop_gap
from tests.tools.web_site import Site, answer, redirect, web_site
from tgi_cli.vision import addresses, fetch
from tgi_cli.vision.errors import MediaError
from tgi_cli.vision.fetch import MAX_REDIRECTS, MediaFetcher, resolve
from tgi_cli.vision.limits import ImageLimits

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="127.0.0.2 is an address of this machine on Linux only"
)
IMAGE = b"the bytes of an image"
OUTSIDE = "127.0.0.2"
"""An address of this machine that stands for a public one in these tests."""
NAME = "images.example"
INNER = "inner.example"
REAL = "a number"
"""Resolved by the system, which takes numbers in many forms without a network."""


class Names:
    """A resolver with prepared answers, each for one call and the last for all further ones."""

    def __init__(self, **hosts: Sequence[Sequence[str]]) -> None:
        self.asked: list[tuple[str, int]] = []
        self._hosts = {name.replace("_", "."): list(found) for name, found in hosts.items()}

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        if host not in self._hosts:
            raise OSError("no such host")
        found = self._hosts[host]
        return found.pop(0) if len(found) > 1 else found[0]


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let OUTSIDE count as public; all other addresses are judged as usual."""

    def judge(address: str, private: bool = False) -> bool:
        return address == OUTSIDE or addresses.may_be_dialled(address, private)

    monkeypatch.setattr(fetch, "may_be_dialled", judge)


def fetcher(*sites: Site, names: Names | None = None, **limits: Any) -> MediaFetcher:
    """One that may fetch from the ports of these sites, under both names."""
    domains = tuple(f"{name}:{site.port}" for site in sites for name in (NAME, INNER))
    names = names or Names(images_example=[[OUTSIDE]], inner_example=[["127.0.0.1"]])
    return MediaFetcher(ImageLimits(allowed_media_domains=domains, **limits), names)


async def refused(fetcher: MediaFetcher, source: str | bytes) -> str:
    """The text of the refusal."""
    with pytest.raises(MediaError) as caught:
        await fetcher.fetch(source)
    assert not caught.value.unavailable
    return str(caught.value)


async def until(found: Callable[[], bool]) -> None:
    for _ in range(3000):
        if found():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it did not happen within 30 s")


class TestSources:
    """Without a flag, images come with the request only."""

    @pytest.mark.parametrize("size", [21, 200_000])
    async def test_data_urls_and_bytes(self, size: int) -> None:
        data = (IMAGE * size)[:size]
        own = MediaFetcher(ImageLimits(), Names())
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        assert await own.fetch(url) == data
        assert await own.fetch(data) == data

    @pytest.mark.parametrize("url", ["http://images.example/a", "HTTPS://images.example/a"])
    async def test_urls_need_a_flag_which_is_named(self, url: str) -> None:
        names = Names(images_example=[[OUTSIDE]])
        text = await refused(MediaFetcher(ImageLimits(), names), url)
        assert text.startswith("Could not fetch image: this server fetches no URLs (--media-fetch)")
        assert names.asked == []

    @pytest.mark.parametrize(
        "source",
        ["", "x", "/etc/passwd", "ftp://a.b/", "file:///etc/passwd", "blob:x", "javascript:x"],
    )
    async def test_other_sources_are_refused(self, source: str) -> None:
        own = MediaFetcher(ImageLimits(media_fetch=True), Names())
        text = await refused(own, source)
        assert text == "invalid image content: its URL must begin with data:, http: or https:"

    async def test_bytes_have_a_limit(self) -> None:
        own = MediaFetcher(ImageLimits(max_image_fetch_size=20), Names())
        expected = "Image size 21 bytes exceeds maximum allowed size of 20 bytes"
        assert await refused(own, IMAGE) == expected
        assert await refused(own, b"") == "invalid image: it is empty"

    async def test_files_below_the_allowed_folder(self, tmp_path: Path) -> None:
        (tmp_path / "a.png").write_bytes(IMAGE)
        own = MediaFetcher(ImageLimits(allowed_local_media_path=tmp_path), Names())
        assert await own.fetch(f"file://{tmp_path}/a.png") == IMAGE
        assert "no such file" in await refused(own, f"file://{tmp_path}/../a.png")


HOST, PORT = "its host has an address", "its port is not allowed"
NO_HOST, INVALID = "its host cannot be resolved", "invalid image content"
CORPUS: list[tuple[str, str | list[str], str]] = [
    # URL, addresses of its host, and either the address that is dialled or words of the refusal
    ("http://a.example/", ["93.184.216.34"], "93.184.216.34"),
    ("https://a.example/x.png?y#z", ["93.184.216.34", "93.184.216.35"], "93.184.216.34"),
    ("https://a.example:443/", ["2606:4700::1111"], "2606:4700::1111"),
    ("http://a.example:443/", ["93.184.216.34"], "93.184.216.34"),
    ("http://93.184.216.34/", REAL, "93.184.216.34"),
    ("http://[2606:4700::1111]/", REAL, "2606:4700::1111"),
    ("http://[2606:4700:0::1111]/", REAL, "2606:4700::1111"),
    ("http://1572395042/", REAL, "93.184.216.34"),
    ("https://bücher.example/", ["93.184.216.34"], "93.184.216.34"),
    # this machine
    ("http://127.0.0.1/", REAL, HOST),
    ("http://127.1/", REAL, HOST),
    ("http://127.0.1/", REAL, HOST),
    ("http://2130706433/", REAL, HOST),
    ("http://0x7f000001/", REAL, HOST),
    ("http://0x7f.0x0.0x0.0x1/", REAL, HOST),
    ("http://0177.0.0.1/", REAL, f"{HOST}|{INVALID}"),
    ("http://017700000001/", REAL, HOST),
    ("http://127。0。0。1/", REAL, HOST),
    ("http://①②⑦.0.0.1/", REAL, f"{HOST}|{INVALID}"),
    ("http://0/", REAL, HOST),
    ("http://0.0.0.0/", REAL, HOST),
    ("http://[::1]/", REAL, HOST),
    ("http://[::]/", REAL, HOST),
    ("http://[0:0:0:0:0:0:0:1]/", REAL, HOST),
    ("http://[::ffff:127.0.0.1]/", REAL, HOST),
    ("http://[::ffff:7f00:1]/", REAL, HOST),
    ("http://localhost/", ["127.0.0.1"], HOST),
    ("http://localhost./", ["::1"], HOST),
    ("http://127.0.0.1.nip.example/", ["127.0.0.1"], HOST),
    # metadata of clouds
    ("http://169.254.169.254/latest/meta-data/", REAL, HOST),
    ("http://2852039166/", REAL, HOST),
    ("http://0xa9fea9fe/", REAL, HOST),
    ("http://metadata.google.internal/", ["169.254.169.254"], HOST),
    ("http://[::ffff:169.254.169.254]/", REAL, HOST),
    ("http://[64:ff9b::a9fe:a9fe]/", REAL, HOST),
    ("http://[fd00:ec2::254]/", REAL, HOST),
    ("http://[fe80::a9fe:a9fe]/", REAL, HOST),
    ("http://100.100.100.200/", REAL, HOST),
    ("http://168.63.129.16/", REAL, HOST),
    ("http://192.0.0.192/", REAL, HOST),
    # private networks
    ("http://10.0.0.1/", REAL, HOST),
    ("http://172.16.0.1/", REAL, HOST),
    ("http://192.168.1.1/", REAL, HOST),
    ("http://3232235777/", REAL, HOST),
    ("http://100.64.0.1/", REAL, HOST),
    ("http://[fc00::1]/", REAL, HOST),
    ("http://intranet/", ["10.1.2.3"], HOST),
    ("http://both.example/", ["93.184.216.34", "10.0.0.1"], HOST),
    ("http://both.example/", ["2606:4700::1111", "::1"], HOST),
    # others
    ("http://224.0.0.1/", REAL, HOST),
    ("http://255.255.255.255/", REAL, HOST),
    ("http://[2002:7f00:1::]/", REAL, HOST),
    ("http://[2001:0:7f00:1::]/", REAL, HOST),
    ("http://[fec0::1]/", REAL, HOST),
    ("http://[ff02::1]/", REAL, HOST),
    ("http://odd.example/", ["not an address"], HOST),
    ("http://none.example/", [], NO_HOST),
    ("http://256.256.256.256/", REAL, INVALID),
    # ports
    ("http://a.example:22/", ["93.184.216.34"], PORT),
    ("http://a.example:6379/", ["93.184.216.34"], PORT),
    ("https://a.example:8443/", ["93.184.216.34"], PORT),
    # forms
    ("http://user:password@a.example/", ["93.184.216.34"], INVALID),
    ("http://a.example\\@127.0.0.1/", ["93.184.216.34"], INVALID),
    ("http://127.0.0.1\\@a.example/", ["93.184.216.34"], INVALID),
    ("http://a.example@127.0.0.1/", ["93.184.216.34"], INVALID),
    ("http://a.example /", ["93.184.216.34"], INVALID),
    ("http://a.example/\r\nX: y", ["93.184.216.34"], INVALID),
    ("http://127%2e0.0.1/", ["127.0.0.1"], INVALID),
    ("http://[fe80::1%25eth0]/", ["fe80::1"], INVALID),
]


def test_the_corpus_is_large() -> None:
    assert len(CORPUS) >= 60
    assert sum(not expected[0].isdigit() for _, _, expected in CORPUS) >= 55


class TestCorpus:
    @pytest.mark.parametrize(
        ("url", "found", "expected"), CORPUS, ids=[f"{n} {row[0]}" for n, row in enumerate(CORPUS)]
    )
    async def test_each_url_reaches_what_it_may(
        self, url: str, found: str | list[str], expected: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dialled: list[tuple[str, str, str]] = []

        async def handle(self: Any, request: httpcore.Request) -> httpcore.Response:
            sni = request.extensions["sni_hostname"]
            name = dict(request.headers)[b"host"].decode()
            dialled.append((request.url.host.decode(), name, sni))
            return httpcore.Response(200, content=IMAGE)

        async def prepared(host: str, port: int) -> Sequence[str]:
            return await resolve(host, port) if found is REAL else found

        monkeypatch.setattr(httpcore.AsyncConnectionPool, "handle_async_request", handle)
        own = MediaFetcher(ImageLimits(media_fetch=True), prepared)
        if expected[0].isdigit():
            assert await own.fetch(url) == IMAGE
            parsed = httpx.URL(url)
            host = parsed.raw_host.decode()
            assert dialled == [(expected, parsed.netloc.decode(), host)]
        else:
            text = await refused(own, url)
            assert any(words in text for words in expected.split("|"))
            assert dialled == []


class TestNames:
    async def test_the_judged_address_is_dialled_with_the_name(self) -> None:
        names = Names(images_example=[[OUTSIDE], ["127.0.0.1"]])
        async with (
            web_site(answer(IMAGE), host=OUTSIDE) as site,
            web_site(answer(b"secret"), port=site.port) as inner,
        ):
            url = f"http://{NAME}:{site.port}/a.png?b=c#d"
            assert await fetcher(site, names=names).fetch(url) == IMAGE
            assert names.asked == [(NAME, site.port)], "resolved once"
        assert (site.connections, inner.connections) == (1, 0)
        head = site.requests[0].lower().split("\r\n")
        assert head[0] == "get /a.png?b=c http/1.1"
        assert f"host: {NAME}:{site.port}" in head
        assert "accept-encoding: identity" in head
        assert not any(line.startswith(("cookie:", "authorization:")) for line in head)

    async def test_a_name_that_changes_its_address_is_judged_each_time(self) -> None:
        names = Names(images_example=[[OUTSIDE], ["127.0.0.1"]])
        async with (
            web_site(redirect("/again"), host=OUTSIDE) as site,
            web_site(answer(b"secret"), port=site.port) as inner,
        ):
            text = await refused(fetcher(site, names=names), f"http://{NAME}:{site.port}/")
        assert "an address that is not allowed" in text
        assert (site.connections, inner.connections) == (1, 0)

    async def test_all_addresses_are_judged(self) -> None:
        names = Names(images_example=[[OUTSIDE, "127.0.0.1"]])
        async with web_site(answer(IMAGE), host=OUTSIDE) as site:
            await refused(fetcher(site, names=names), f"http://{NAME}:{site.port}/")
        assert site.connections == 0

    async def test_the_next_address_is_dialled_if_one_refuses(self) -> None:
        names = Names(images_example=[["127.0.0.3", OUTSIDE]])
        async with web_site(answer(IMAGE), host=OUTSIDE) as site:
            own = fetcher(site, names=names, allow_private_media=True)
            assert await own.fetch(f"http://{NAME}:{site.port}/") == IMAGE

    async def test_unreachable_servers(self) -> None:
        async with web_site(answer(IMAGE), host=OUTSIDE) as site:
            pass
        text = await refused(fetcher(site), f"http://{NAME}:{site.port}/")
        assert text == "Could not fetch image: the server cannot be reached"


class TestDomains:
    @pytest.mark.parametrize(
        ("domains", "url", "allowed"),
        [
            (["images.example"], "http://images.example/", True),
            (["images.example"], "https://IMAGES.example/", True),
            (["images.example"], "http://images.example:8080/", False),
            (["images.example:8080"], "http://images.example:8080/", True),
            (["images.example:8080"], "http://images.example/", False),
            (["images.example", "images.example:8080"], "http://images.example:8080/", True),
            (["images.example"], "http://sub.images.example/", False),
            (["images.example"], "http://images.example.evil.example/", False),
            (["images.example"], "http://images.example./", False),
            (["images.example"], "http://evil.example/images.example", False),
            (["images.example"], "http://93.184.216.34/", False),
            (["93.184.216.34"], "http://93.184.216.34/", True),
            (["93.184.216.34"], "http://1572395042/", False),
            (["[2606:4700::1111]:80"], "http://[2606:4700:0:0::1111]/", True),
        ],
    )
    async def test_hosts_are_compared_exactly(
        self, domains: list[str], url: str, allowed: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def handle(self: Any, request: httpcore.Request) -> httpcore.Response:
            return httpcore.Response(200, content=IMAGE)

        async def names(host: str, port: int) -> Sequence[str]:
            return ["93.184.216.34"]

        monkeypatch.setattr(httpcore.AsyncConnectionPool, "handle_async_request", handle)
        own = MediaFetcher(ImageLimits(allowed_media_domains=tuple(domains)), names)
        if allowed:
            assert await own.fetch(url) == IMAGE
        else:
            assert "allowed" in await refused(own, url)

    async def test_an_allowed_host_may_not_have_a_private_address(self) -> None:
        async with web_site(answer(IMAGE)) as site:
            url = f"http://{INNER}:{site.port}/"
            assert "an address that is not allowed" in await refused(fetcher(site), url)
            assert site.connections == 0
            own = fetcher(site, allow_private_media=True)
            assert await own.fetch(url) == IMAGE


class TestRedirects:
    async def test_redirects_are_followed(self) -> None:
        async def absolute(writer: asyncio.StreamWriter) -> None:
            writer.write(redirect(f"http://{NAME}:{site.port}/c", "308 Permanent"))

        hops = [redirect("/b"), absolute, redirect("d"), answer(IMAGE)]
        async with web_site(*hops, host=OUTSIDE) as site:
            assert await fetcher(site).fetch(f"http://{NAME}:{site.port}/a") == IMAGE
        assert [request.split()[1] for request in site.requests] == ["/a", "/b", "/c", "/d"]

    async def test_the_number_of_redirects_is_limited(self) -> None:
        async with web_site(redirect("/again"), host=OUTSIDE) as site:
            text = await refused(fetcher(site), f"http://{NAME}:{site.port}/")
        assert text == "Could not fetch image: it has more than 3 redirects"
        assert site.connections == MAX_REDIRECTS + 1

    @pytest.mark.parametrize("status", ["301 x", "302 x", "303 x", "307 x", "308 x"])
    @pytest.mark.parametrize(
        ("target", "words"),
        [
            ("http://127.0.0.1:PORT/", "its host is not among the allowed ones"),
            ("http://inner.example:PORT/", "an address that is not allowed"),
            ("//inner.example:PORT/", "an address that is not allowed"),
            ("http://images.example:1/", "its port is not allowed"),
            ("http://user@images.example:PORT/", "a user name"),
            ("http:\\\\inner.example:PORT/", "no backslashes"),
            ("file:///etc/passwd", "must begin with"),
            ("data:image/png;base64,eHl6", "must begin with"),
            ("gopher://inner.example:PORT/", "must begin with"),
        ],
    )
    async def test_redirects_are_judged_anew(self, status: str, target: str, words: str) -> None:
        async with web_site(answer(b"secret")) as inner:
            location = target.replace("PORT", str(inner.port))
            async with web_site(redirect(location, status), host=OUTSIDE) as site:
                url = f"http://{NAME}:{site.port}/"
                assert words in await refused(fetcher(site, inner), url)
        assert (site.connections, inner.connections) == (1, 0)

    async def test_cookies_are_not_kept(self) -> None:
        first = redirect("/b", set_cookie="a=b; path=/")
        async with web_site(first, answer(IMAGE), host=OUTSIDE) as site:
            own = fetcher(site)
            for _ in range(2):
                assert await own.fetch(f"http://{NAME}:{site.port}/") == IMAGE
        assert not any("cookie" in request.lower() for request in site.requests)


class TestEnvironment:
    @pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
    async def test_proxies_are_not_used(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        async with (
            web_site(answer(b"proxied")) as proxy,
            web_site(answer(IMAGE), host=OUTSIDE) as site,
        ):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
            assert await fetcher(site).fetch(f"http://{NAME}:{site.port}/") == IMAGE
        assert proxy.connections == 0

    async def test_netrc_is_not_used(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        netrc = tmp_path / "netrc"
        netrc.write_text("default login user password secret\n")
        monkeypatch.setenv("NETRC", str(netrc))
        async with web_site(answer(IMAGE), host=OUTSIDE) as site:
            await fetcher(site).fetch(f"http://{NAME}:{site.port}/")
        assert "authorization" not in site.requests[0].lower()


class TestTls:
    @pytest.fixture
    def authority(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
        authority = Authority(tmp_path)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
        return authority

    @pytest.mark.parametrize(("certified", "trusted"), [(NAME, True), (INNER, False)])
    async def test_the_certificate_must_be_that_of_the_name(
        self, authority: Authority, certified: str, trusted: bool
    ) -> None:
        asked: list[str | None] = []
        identity = authority.issue(certified)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(identity.certificate, identity.key)
        context.sni_callback = lambda _, name, __: asked.append(name)
        async with web_site(answer(IMAGE), host=OUTSIDE, tls=context) as site:
            url = f"https://{NAME}:{site.port}/"
            if trusted:
                assert await fetcher(site).fetch(url) == IMAGE
            else:
                assert "cannot be reached" in await refused(fetcher(site), url)
                assert site.requests == []
        assert asked == [NAME]


def chunked(pieces: Iterable[bytes]) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    return write


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(bytes(65536))
        await writer.drain()


async def silent(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def dripping(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


async def endless_head(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"x: " + b"y" * 1000 + b"\r\n")
        await writer.drain()


async def without_answer(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"HTTP/1.1 100 \r\n\r\n" * 1000)
        await writer.drain()


async def waiting_redirect(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(0.2)
    writer.write(redirect("/again"))


class TestServers:
    """Servers that behave badly: each gives the fixed words for it, soon and with little memory."""

    @pytest.mark.parametrize(
        ("reply", "words"),
        [
            (answer(status="404 Not Found"), "its server answered with status 404"),
            (answer(status="204 No Content"), "its server answered with status 204"),
            (answer(status="304 Not Modified"), "its server answered with status 304"),
            (answer(status="302 Found"), "its server answered with status 302"),
            (answer(status="500 <script>"), "its server answered with status 500"),
            (answer(), "invalid image: it is empty"),
            (answer(bytes(1001)), "Image size 1001 bytes exceeds maximum allowed size of 1000"),
            (answer(content_length=10**15), "Image size 1000000000000000 bytes exceeds"),
            (answer(content_length=10**40), "the connection failed"),
            (answer(IMAGE, content_length=100), "the connection failed"),
            (answer(IMAGE, content_length="x"), "the connection failed"),
            (b"no HTTP at all\r\n\r\n", "the connection failed"),
            (b"", "the connection failed"),
            (answer(gzip.compress(bytes(10**7)), content_encoding="gzip"), "sent it compressed"),
            (answer(IMAGE, content_encoding="br"), "sent it compressed"),
            (chunked([b"x"] * 999 + [bytes(2)]), "Image size exceeds maximum allowed size of 1000"),
            (endless, "Image size exceeds maximum allowed size of 1000 bytes"),
            (endless_head, "its server sends too much before it"),
            (without_answer, "its server sends too much before it"),
        ],
    )
    async def test_bad_answers(self, reply: Any, words: str) -> None:
        async with web_site(reply, host=OUTSIDE) as site:
            own = fetcher(site, max_image_fetch_size=1000)
            text = await refused(own, f"http://{NAME}:{site.port}/")
        assert words in text
        assert "script" not in text

    @pytest.mark.parametrize("reply", [silent, dripping, waiting_redirect])
    async def test_slow_servers_have_one_deadline(self, reply: Any) -> None:
        async with web_site(reply, host=OUTSIDE) as site:
            own = fetcher(site, media_fetch_timeout=0.5)
            async with asyncio.timeout(20):
                text = await refused(own, f"http://{NAME}:{site.port}/")
        assert text == "Could not fetch image: it took more than 0.5 s"

    async def test_names_are_resolved_in_threads_of_their_own(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However many never are, other work of threads goes on."""
        gate, threads = threading.Event(), set[str]()

        def stuck(*_: Any, **__: Any) -> Any:
            threads.add(threading.current_thread().name)
            gate.wait(60)
            raise OSError

        monkeypatch.setattr(socket, "getaddrinfo", stuck)
        own = MediaFetcher(ImageLimits(media_fetch=True, media_fetch_timeout=0.2))
        try:
            found = await asyncio.gather(
                *(own.fetch(f"http://{number}.example/") for number in range(40)),
                return_exceptions=True,
            )
            assert await asyncio.wait_for(asyncio.to_thread(threading.get_ident), 30)
        finally:
            gate.set()
        assert all(isinstance(error, MediaError) for error in found)
        assert len(threads) <= 8
        assert all(name.startswith("resolve") for name in threads)

    async def test_slow_resolvers_count(self) -> None:
        async def slow(host: str, port: int) -> Sequence[str]:
            await asyncio.sleep(60)
            return []

        own = MediaFetcher(ImageLimits(media_fetch=True, media_fetch_timeout=0.1), slow)
        assert "it took more than 0.1 s" in await refused(own, "http://a.example/")

    async def test_tiny_pieces_are_refused_and_do_not_hold_the_loop(self) -> None:
        pieces = b"1\r\nx\r\n" * 200_000

        async def tiny(writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + pieces)

        async with web_site(tiny, host=OUTSIDE) as site, loop_gap() as gap:
            text = await refused(fetcher(site), f"http://{NAME}:{site.port}/")
        assert text == "Could not fetch image: its server sends it in too small pieces"
        assert gap.turns > 5

    async def test_informational_answers_do_not_hold_the_loop(self) -> None:
        """17 bytes each: 30 KB of them have 1,800, which are read in eight parts."""
        early = b"HTTP/1.1 100 \r\n\r\n" * 1800
        async with web_site(early + answer(IMAGE), host=OUTSIDE) as site, loop_gap() as gap:
            assert await fetcher(site).fetch(f"http://{NAME}:{site.port}/") == IMAGE
        assert gap.turns >= 3

    async def test_answers_in_pieces(self) -> None:
        body = bytes(range(256)) * 8
        async with web_site(chunked([body[:1], body[1:1000], body[1000:]]), host=OUTSIDE) as site:
            assert await fetcher(site).fetch(f"http://{NAME}:{site.port}/") == body

    async def test_informational_answers_are_skipped(self) -> None:
        early = b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"
        async with web_site(early + answer(IMAGE), host=OUTSIDE) as site:
            assert await fetcher(site).fetch(f"http://{NAME}:{site.port}/") == IMAGE

    async def test_few_are_fetched_at_once(self) -> None:
        gate = asyncio.Event()

        async def gated(writer: asyncio.StreamWriter) -> None:
            await gate.wait()
            writer.write(answer(IMAGE))

        async with web_site(gated, host=OUTSIDE) as site:
            own = fetcher(site, media_fetch_timeout=60)
            url = f"http://{NAME}:{site.port}/"
            tasks = [asyncio.ensure_future(own.fetch(url)) for _ in range(20)]
            await until(lambda: site.open == 8)
            await asyncio.sleep(0.1)
            gate.set()
            assert await asyncio.gather(*tasks) == [IMAGE] * 20
        assert site.most_open == 8

    async def test_waiting_for_others_has_a_deadline(self) -> None:
        async with web_site(silent, host=OUTSIDE) as site:
            slow = fetcher(site, media_fetch_timeout=0.5)
            url = f"http://{NAME}:{site.port}/"
            found = await asyncio.gather(
                *(slow.fetch(url) for _ in range(20)), return_exceptions=True
            )
        texts = {str(error) for error in found}
        assert texts <= {
            "Could not fetch image: it took more than 0.5 s",
            "Could not fetch image: too many images are being fetched",
        }
        assert any(isinstance(error, MediaError) and error.unavailable for error in found)

    async def test_cancelled_fetches_leave_no_connection(self) -> None:
        async with web_site(silent, host=OUTSIDE) as site:
            own = fetcher(site, media_fetch_timeout=60)
            url = f"http://{NAME}:{site.port}/"
            for _ in range(10):  # more than may be in progress
                task = asyncio.ensure_future(own.fetch(url))
                begun = site.connections
                await until(lambda begun=begun: site.connections > begun)  # type: ignore[misc]
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
