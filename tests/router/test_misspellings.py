"""Parameters that are probably misspelt are ignored with a warning."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest

from tgi_cli.router.http import misspellings
from tgi_cli.router.http.misspellings import MisspellingLog

LOGGER = MisspellingLog.__module__
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("route", "body", "name", "meant"),
    [
        ("/v1/chat/completions", CHAT | {"max_token": 3}, "max_token", "max_tokens"),
        ("/v1/completions", {"prompt": "a", "Temprature": 1}, "Temprature", "temperature"),
        ("/v1/messages", CHAT | {"model": "tgi", "max_tokens": 2, "topK": 1}, "topK", "top_k"),
        (
            "/generate",
            {"inputs": "a", "parameters": {"max_tokens": 3}},
            "max_tokens",
            "max_new_tokens",
        ),
        ("/", {"inputs": "a", "parameter": {}}, "parameter", "parameters"),
    ],
)
async def test_misspelt_parameters_are_logged_once(
    client: httpx.AsyncClient,
    caplog: pytest.LogCaptureFixture,
    route: str,
    body: dict[str, Any],
    name: str,
    meant: str,
) -> None:
    with caplog.at_level(logging.WARNING, LOGGER):
        for _ in range(2):
            assert (await client.post(route, json=body)).status_code == 200
    (record,) = (each for each in caplog.records if each.name == LOGGER)
    assert record.getMessage() == (
        f"{route}: `{name}` is not a parameter and is ignored; did you mean `{meant}`?"
    )


@pytest.mark.parametrize(
    "extra",
    [
        {"user": "me", "store": True, "metadata": {}, "client_metadata": {}, "plugins": []},
        {"max_token": 3, "max_tokens": 3},
        {"max token": 3, "x" * 50: 1, "": 2},
        {
            "a1": 1,
            "a2": 1,
            "a3": 1,
            "a4": 1,
            "a5_": 1,
            "a6_": 1,
            "a7_": 1,
            "a8_": 1,
            "max_token": 3,
        },
    ],
    ids=["other", "beside the right one", "no names", "too many"],
)
async def test_other_unknown_parameters_are_not(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, extra: dict[str, Any]
) -> None:
    with caplog.at_level(logging.WARNING, LOGGER):
        assert (await client.post("/v1/chat/completions", json=CHAT | extra)).status_code == 200
    assert [each for each in caplog.records if each.name == LOGGER] == []


async def test_names_that_are_no_text_are_ignored(client: httpx.AsyncClient) -> None:
    answer = await client.post(
        "/generate",
        content=b'{"inputs": "a", "\xff\xfe": 1}',
        headers={"content-type": "application/json"},
    )
    assert answer.status_code in (200, 400)


async def test_only_a_few_of_many_unknown_names_are_compared(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []
    similar = misspellings._similar

    def watched(name: str, kind: Any) -> str:
        compared.append(name)
        return similar(name, kind)

    monkeypatch.setattr(misspellings, "_similar", watched)
    many = {f"temperatur{number}": 1 for number in range(3000)}
    answer = await client.post("/generate", json=many | {"inputs": "a", "parameters": many})
    assert answer.status_code == 200
    assert compared == [], "a body of more than 64 KiB is not looked at"
    many = dict(list(many.items())[:1500])
    await client.post("/generate", json=many | {"inputs": "a", "parameters": many})
    assert compared == [f"temperatur{number}" for number in range(4)] * 2
