"""Sources of images as text."""

from __future__ import annotations

import base64

import httpx
import pytest

from tgi_cli.vision.errors import MediaError
from tgi_cli.vision.urls import MAX_URL_CHARACTERS, decode_data_url, parse_url

MOST = 3_000_000
LARGE = bytes(range(256)) * 4000
"""Several pieces."""


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


class TestDataUrls:
    @pytest.mark.parametrize(
        "data",
        [b"x", b"xy", b"xyz", LARGE, LARGE + b"x", LARGE + b"xy", bytes(192 << 10)],
        ids=["1", "2", "3", "large", "large + 1", "large + 2", "one piece"],
    )
    def test_bytes_are_decoded(self, data: bytes) -> None:
        assert decode_data_url(data_url(data), MOST) == data

    @pytest.mark.parametrize(
        "start",
        ["DATA:IMAGE/PNG;BASE64,", "data:;base64,", "data:application/octet-stream;base64,"],
    )
    def test_case_and_media_type_do_not_matter(self, start: str) -> None:
        assert decode_data_url(start + "eHl6", MOST) == b"xyz"

    @pytest.mark.parametrize(
        ("url", "code", "words"),
        [
            ("data:image/png,eHl6", "invalid_image_url", "invalid image content: a data: URL must"),
            ("data:image/png;charset=x;base64,eHl6", "invalid_image_url", "must have the form"),
            ("data:image/png;base64", "invalid_image_url", "must have the form"),
            (f"data:{'a' * 256};base64,eHl6", "invalid_image_url", "must have the form"),
            ("data:image/png ;base64,eHl6", "invalid_image_url", "must have the form"),
            ("data:text/html;base64,eHl6", "unsupported_image_media_type", "media type"),
            ("data:image/png;base64,", "empty_image_file", "invalid image: it is empty"),
            ("data:image/png;base64,eHl", "invalid_base64_image", "base64 encoding is invalid"),
            ("data:image/png;base64,eHl6=", "invalid_base64_image", "wrong padding"),
            ("data:image/png;base64,eHl6====", "invalid_base64_image", "wrong padding"),
            ("data:image/png;base64,eA", "invalid_base64_image", "wrong padding"),
            ("data:image/png;base64,eA===", "invalid_base64_image", "wrong padding"),
            ("data:image/png;base64,====", "invalid_base64_image", "wrong padding"),
            ("data:image/png;base64,eH l6", "invalid_base64_image", "other characters"),
            ("data:image/png;base64,eHl6\n", "invalid_base64_image", "other characters"),
            ("data:image/png;base64,eHl-", "invalid_base64_image", "other characters"),
            ("data:image/png;base64,eHlé", "invalid_base64_image", "other characters"),
            ("data:image/png;base64,eA==eHl6", "invalid_base64_image", "other characters"),
        ],
    )
    def test_other_forms_are_refused(self, url: str, code: str, words: str) -> None:
        with pytest.raises(MediaError, match=words) as caught:
            decode_data_url(url, MOST)
        assert caught.value.code == code
        assert not caught.value.unavailable

    def test_padding_between_pieces_is_refused(self) -> None:
        piece = base64.b64encode(bytes((192 << 10) - 1)).decode()
        assert len(piece) == 256 << 10
        assert piece.endswith("=")
        with pytest.raises(MediaError, match="base64 encoding is invalid"):
            decode_data_url(f"data:image/png;base64,{piece}eHl6", MOST)

    @pytest.mark.parametrize("length", [3, 4, 5])
    def test_the_size_is_known_before_decoding(self, length: int) -> None:
        url = data_url(bytes(length))
        assert len(decode_data_url(url, length)) == length
        with pytest.raises(MediaError) as caught:
            decode_data_url(url, length - 1)
        expected = f"Image size {length} bytes exceeds maximum allowed size of {length - 1} bytes"
        assert str(caught.value) == expected


class TestUrls:
    @pytest.mark.parametrize(
        ("url", "host", "port", "target"),
        [
            ("http://example.org", b"example.org", None, b"/"),
            ("HTTPS://Example.ORG/A?b=c#d", b"example.org", None, b"/A?b=c"),
            ("https://example.org:443/", b"example.org", None, b"/"),
            ("http://example.org:8080/a/../b", b"example.org", 8080, b"/b"),
            ("https://bücher.example/ü", b"xn--bcher-kva.example", None, b"/%C3%BC"),
            ("http://[2606:4700::1111]/", b"2606:4700::1111", None, b"/"),
            ("http://2130706433/", b"2130706433", None, b"/"),
            ("http://127。0。0。1/", b"127.0.0.1", None, b"/"),
            ("http://a_b.example/", b"a_b.example", None, b"/"),
            ("http://example.org/?u=http://x@y", b"example.org", None, b"/?u=http://x@y"),
        ],
    )
    def test_urls_are_parsed_once(
        self, url: str, host: bytes, port: int | None, target: bytes
    ) -> None:
        found = parse_url(url)
        assert (found.raw_host, found.port, found.raw_path) == (host, port, target)

    @pytest.mark.parametrize(
        "url",
        [
            *("ftp://example.org/", "file:///etc/passwd", "gopher://example.org:70/_x", "//a.b/"),
            *("http:", "http://", "http:///a.png", "https:example.org", "example.org/a.png"),
            *(
                "http://user@example.org/",
                "http://user:pass@example.org/",
                "http://:p@example.org/",
            ),
            *("http://example.org\\@127.0.0.1/", "http:\\\\127.0.0.1\\", "http://a.b/\\..\\c"),
            *(
                "http://exam ple.org/",
                " http://example.org/",
                "http://example.org/a b",
                "http://a\tb/",
            ),
            *("http://example.org/\r\nHost: x", "http://example.org/\x00", "http://a\u00a0b/"),
            *("http://127%2e0.0.1/", "http://a{b}.example/", "http://a|b/", "http://a`b/"),
            *("http://a\ud800.example/", "http://example.org/\ud800"),
            *("http://999.1.1.1/", "http://[::1", "http://[::1%25eth0]/", "http://[v1.x]/"),
            *("http://example.org:port/", "http://example.org:0/", "http://example.org:99999/"),
            *("http://" + "a" * MAX_URL_CHARACTERS, "javascript:alert(1)"),
        ],
    )
    def test_invalid_and_ambiguous_urls_are_refused(self, url: str) -> None:
        with pytest.raises(MediaError, match=r"^invalid image content: ") as caught:
            parse_url(url)
        assert caught.value.code == "invalid_image_url"
        assert "example" not in str(caught.value), "fixed words"

    @pytest.mark.parametrize(
        ("location", "expected"),
        [
            ("/b.png", "https://example.org/b.png"),
            ("b.png", "https://example.org/x/b.png"),
            ("//other.example/c", "https://other.example/c"),
            ("http://127.0.0.1/", "http://127.0.0.1/"),
            ("?q", "https://example.org/x/y?q"),
        ],
    )
    def test_redirects_are_relative_to_their_url(self, location: str, expected: str) -> None:
        assert parse_url(location, httpx.URL("https://example.org/x/y")) == expected

    @pytest.mark.parametrize(
        "location",
        ["file:///etc/passwd", "data:image/png;base64,eHl6", "//u@h/", "\\\\h", "http://"],
    )
    def test_redirects_are_checked_as_urls_are(self, location: str) -> None:
        with pytest.raises(MediaError, match=r"^invalid image content: "):
            parse_url(location, httpx.URL("https://example.org/x/y"))
