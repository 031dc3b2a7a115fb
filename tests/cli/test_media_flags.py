"""Flags of where images may come from: what reaches the router, and what is refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tgi_cli.cli import main
from tgi_cli.config.settings import SETTINGS, default
from tgi_cli.errors import ExitCode
from tgi_cli.vision.limits import ImageLimits, parse_domain


def limits(served: dict[str, Any], *flags: str) -> ImageLimits:
    assert main.run(["serve", "org/m", *flags]) == ExitCode.OK
    found: ImageLimits = served["router"].image_limits
    return found


def test_nothing_is_fetched_by_default(served: dict[str, Any]) -> None:
    found = limits(served)
    assert found == ImageLimits()
    assert not found.fetches
    assert found.allowed_local_media_path is None


def test_each_flag_has_its_effect(served: dict[str, Any], tmp_path: Path) -> None:
    flags = ["--media-fetch", "--allowed-media-domains", "a.example, b.example:8080"]
    flags += ["--allowed-media-domains=[2001:db8::1]", "--allow-private-media"]
    flags += ["--allowed-local-media-path", str(tmp_path), "--media-fetch-timeout", "2.5"]
    flags += ["--max-image-fetch-size=7", "--max-image-pixels=8", "--max-images=9"]
    flags += ["--image-workers=3"]
    assert limits(served, *flags) == ImageLimits(
        media_fetch=True,
        allowed_media_domains=("a.example", "b.example:8080", "[2001:db8::1]"),
        allow_private_media=True,
        allowed_local_media_path=tmp_path,
        media_fetch_timeout=2.5,
        max_image_fetch_size=7,
        max_image_pixels=8,
        max_images=9,
        image_workers=3,
    )


def test_each_limit_is_a_setting() -> None:
    names = {setting.name for setting in SETTINGS}
    for field in fields(ImageLimits):
        assert field.name in names
        assert getattr(ImageLimits(), field.name) == (default(field.name) or field.default)


def test_domains_imply_fetching(served: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLOWED_MEDIA_DOMAINS", "a.example,b.example")
    found = limits(served)
    assert found.fetches
    assert found.allowed_media_domains == ("a.example", "b.example")


@pytest.mark.parametrize(
    "word",
    [
        *("https://a.example", "a.example/x", "*.example", "a.example:", "a.example:0", ","),
        *("a.example:65536", "a.example:http", "2001:db8::1", "user@a.example", "bücher.example"),
        *("-a.example", "a.example.", "[::1", "[x]"),
    ],
)
def test_words_that_are_no_hosts_are_refused(
    word: str, served: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["serve", "org/m", f"--allowed-media-domains={word}"]) == ExitCode.USAGE
    assert "--allowed-media-domains" in capsys.readouterr().err
    assert served == {}


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("A.Example", ("a.example", None)),
        ("a:1", ("a", 1)),
        ("127.0.0.1:65535", ("127.0.0.1", 65535)),
        ("[2001:DB8:0::1]", ("2001:db8::1", None)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_hosts_and_ports_are_parsed(word: str, expected: tuple[str, int | None]) -> None:
    assert parse_domain(word) == expected


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--allow-private-media"], "--allow-private-media has no effect"),
        (["--allowed-local-media-path", "/nowhere/at/all"], "is not a folder"),
        (["--max-images=0"], "not at least 1"),
        (["--max-image-pixels=0"], "not at least 1"),
        (["--media-fetch-timeout=0"], "not at least 0.1"),
        (["--image-workers=1000"], "not from 1 to 64"),
    ],
)
def test_flags_without_effect_or_sense_are_refused(
    flags: list[str], words: str, served: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["serve", "org/m", *flags]) == ExitCode.USAGE
    assert words in capsys.readouterr().err
    assert served == {}
