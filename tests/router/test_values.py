"""Bounds of the values of a body, and bodies that are not valid."""

from __future__ import annotations

import json
import threading
import tracemalloc
from typing import Any

import httpx
import msgspec
import pytest

from tests.tools.event_loop_gap import loop_gap
from tgi_cli.router import bounds
from tgi_cli.router.http import bodies
from tgi_cli.router.http.errors import ApiError

MEGABYTES = 2_000_000


def filled(unit: bytes, count: int = 0) -> bytes:
    """A list of ``unit``; 0: as many as the payload limit allows."""
    return b"[" + b",".join([unit] * (count or (MEGABYTES - 2) // (len(unit) + 1))) + b"]"


MANY = {
    "arrays": filled(b"[]"),
    "objects": filled(b"{}"),
    "pairs": filled(b'{"a":1}'),
    "strings": filled(b'""'),
    "numbers": filled(b"1"),
    "keys": b"{" + b",".join(b'"%06d":1' % key for key in range(180_000)) + b"}",
}


@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize("route", ["/generate", "/v1/chat/completions", "/v1/responses", "/vertex"])
async def test_too_many_values_are_refused_without_decoding(
    client: httpx.AsyncClient, route: str, name: str
) -> None:
    body = b'{"inputs":"a","grammar":' + MANY[name][: MEGABYTES - 100] + b"}"
    headers = {"content-type": "application/json"}
    tracemalloc.start()
    async with loop_gap() as gap:
        answer = await client.post(route, content=body, headers=headers)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answer.status_code in (400, 422)
    assert "it holds more than" in answer.text
    assert peak < 20_000_000
    assert gap.work < 0.5


@pytest.mark.parametrize("depth", [bounds.DEPTH + 1, 5_000, 900_000])
@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"[":'])
def test_depth_is_bounded(depth: int, opening: str) -> None:
    body = (opening * (depth // (1 + opening.count("[{")) + 1)).encode()[:MEGABYTES]
    with pytest.raises(ApiError) as refused:
        bodies.check_values(body)
    assert refused.value.status in (400, 422)


@pytest.mark.parametrize(
    "value",
    [
        "[" * 10_000,
        "{[" * 10_000 + '"' * 300_000,
        '\\"[' * 100_000,
        "\\" * 9 + '"' + "[{" * 10_000,
        "," * 700_000,
        'if (a["b"]) { c = "\\\\"; }\n' * 40_000,
        "\u00e9[\U0001f600{" * 50_000,
    ],
)
def test_brackets_in_text_are_not_counted(value: str) -> None:
    """What strings contain is not counted, however it is written."""
    for body in ({"inputs": value}, {value[:50_000]: 1}, ["[", value, "{", {"a": value}]):
        bodies.check_values(json.dumps(body).encode())
        bodies.check_values(msgspec.json.encode(body))


def test_bounds_themselves_are_accepted() -> None:
    bodies.check_values(filled(b"[]", bounds.CONTAINERS - 1))
    bodies.check_values(filled(b'"["', bounds.STRINGS))
    bodies.check_values(b"[" * bounds.DEPTH + b"]" * bounds.DEPTH)
    bodies.check_values(filled(b"[" * (bounds.DEPTH - 1) + b"]" * (bounds.DEPTH - 1), 300))
    bodies.check_values(filled(b"1", bounds.VALUES + 1))
    for many in (
        filled(b"1", bounds.VALUES + 2),
        filled(b"[]", bounds.CONTAINERS),
        filled(b'""', bounds.STRINGS + 1),
    ):
        with pytest.raises(ApiError, match="more than"):
            bodies.check_values(many)


LARGE = 32_000_000


@pytest.mark.parametrize(
    "unit",
    [b"1,", b"\\\\", b"\\n", b"\\u0041", b'\\"'],
    ids=["commas", "backslashes", "n", "u", "quotes"],
)
def test_large_bodies_hold_no_more_than_small_ones_can(unit: bytes) -> None:
    """Decoding 32 MB of numbers would take the event loop 0.2 s."""
    small = b'["' + unit * ((MEGABYTES - 10) // len(unit)) + b'"]'
    bodies.check_values(small)
    for count in (LARGE // len(unit), 2_000_001):
        with pytest.raises(ApiError, match="it holds more than") as refused:
            bodies.check_values(b'["' + unit * count + b'"]')
        assert refused.value.status == 422


@pytest.mark.parametrize(
    "text", ["A" * LARGE, "lorem ipsum, dolor\\n" * (LARGE // 50), "A\\/" * 1_900_000]
)
def test_large_texts_are_accepted(text: str) -> None:
    """base64, also with slashes as PHP writes them, and prose."""
    bodies.check_values(b'{"inputs": "%b"}' % text.encode())


class TestLargeBodies:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"payload_limit": LARGE}

    async def test_they_are_checked_off_the_loop(
        self, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[bool] = []
        loop, check = threading.get_ident(), bodies.check_values

        def watched(body: bytes) -> None:
            seen.append(threading.get_ident() == loop)
            check(body)

        monkeypatch.setattr(bodies, "check_values", watched)
        for count in (10, 3_000_000):
            body = {"inputs": "x" * count, "parameters": {"truncate": 5, "max_new_tokens": 1}}
            assert (await client.post("/generate", json=body)).status_code == 200
        assert seen == [True, False]


def test_values_of_half_the_depth_round_trip() -> None:
    value: Any = 1
    for _ in range(bounds.DEPTH // 2):
        value = {"a": [value]}
    body = msgspec.json.encode(value)
    bodies.check_values(body)
    assert json.loads(json.dumps(msgspec.json.decode(body))) == value


BROKEN = {
    "lone surrogate": rb'{"inputs": "\ud800"}',
    "half a pair": rb'{"inputs": "\ud800\u0041"}',
    "utf-16": '{"inputs": "a"}'.encode("utf-16"),
    "bom": b"\xef\xbb\xbf" + b'{"inputs": "a"}',
    "latin-1": b'{"inputs": "\xe9"}',
    "nul": b'{"inputs": "a"}\0',
    "raw nul": b'{"inputs": "\0"}',
    "two": b'{"inputs": "a"}{"inputs": "a"}',
    "nan": b'{"inputs": NaN}',
    "huge": b'{"inputs": 1e999}',
    "digits": b'{"inputs": ' + b"9" * 100_000 + b"}",
    "empty": b"",
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("route", ["/generate", "/tokenize", "/v1/completions", "/vertex"])
async def test_invalid_json_is_a_client_error(
    client: httpx.AsyncClient, route: str, name: str
) -> None:
    body = BROKEN[name].replace(b'"inputs"', b'"prompt"' if "v1" in route else b'"inputs"')
    if route == "/vertex":
        body = b'{"instances": [' + body + b"]}"
    headers = {"content-type": "application/json"}
    answer = await client.post(route, content=body, headers=headers)
    assert answer.status_code in (400, 422)
    assert len(answer.content) < 2000


async def test_compressed_bodies_are_415(client: httpx.AsyncClient) -> None:
    for coding in ("gzip", "br", "gzip, identity"):
        headers = {"content-type": "application/json", "content-encoding": coding}
        answer = await client.post("/generate", content=b"\x1f\x8b", headers=headers)
        assert answer.status_code == 415
        assert answer.headers["accept-encoding"] == "identity"
    headers = {"content-type": "application/json", "content-encoding": "identity"}
    answer = await client.post("/generate", content=b'{"inputs": "a"}', headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=x", "text/plain", "", "json"])
async def test_wrong_types_are_refused(client: httpx.AsyncClient, kind: str) -> None:
    answer = await client.post("/generate", content=b"{}", headers={"content-type": kind})
    assert answer.status_code == 415


async def test_causes_are_truncated(client: httpx.AsyncClient) -> None:
    body = {"inputs": "a", "parameters": {"stop": [{"x" * 100_000: 1}]}}
    answer = await client.post("/generate", json=body)
    assert answer.status_code == 422
    assert len(answer.content) < 1000


@pytest.mark.parametrize(
    "given", ["nan", "inf", "-inf", "1e309", "-1", "0", "", "1e", "0x10", "1" * 10_000]
)
async def test_invalid_deadlines_are_refused(client: httpx.AsyncClient, given: str) -> None:
    headers = {"x-request-timeout": given}
    answer = await client.post("/generate", json={"inputs": "a"}, headers=headers)
    assert answer.status_code == 422
    assert "x-request-timeout" in answer.text
