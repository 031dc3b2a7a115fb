"""A checkpoint's tokenizer whose regular expression backtracks exponentially."""

from __future__ import annotations

import threading

import httpx
import pytest
from tokenizers import Regex, pre_tokenizers

from tests.router.fakes import FakeEngine
from tests.unit.text import tiny
from tgi_cli.router.app import create_app
from tgi_cli.router.config import RouterConfig
from tgi_cli.text.bundle import TextBundle
from tgi_cli.text.tokenizer import Tokenizer

ENDLESS = "x" * 60


@pytest.fixture
def text() -> TextBundle:
    backend = tiny.byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated"), backend.pre_tokenizer]
    )
    return TextBundle(Tokenizer(backend))


@pytest.fixture
async def client(text: TextBundle, config: RouterConfig) -> httpx.AsyncClient:
    app = create_app(FakeEngine(text.tokenizer), text, config)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://router")


async def test_text_on_which_it_fails_is_refused_with_the_cause(client: httpx.AsyncClient) -> None:
    answer = await client.post("/generate", json={"inputs": ENDLESS})
    assert answer.status_code == 422
    assert answer.json()["error_type"] == "tokenizer_error"
    assert "the model's tokenizer fails on a text" in answer.json()["error"]
    assert (await client.post("/tokenize", json={"inputs": ENDLESS})).status_code == 422
    answer = await client.post("/v1/completions", json={"prompt": ENDLESS})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    body = {"prompt": "a", "bad_words": [ENDLESS]}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "bad_words"
    fine = {"inputs": "hello", "parameters": {"max_new_tokens": 2}}
    assert (await client.post("/generate", json=fine)).status_code == 200


async def test_slow_tokenizer_is_moved_off_the_event_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    encode = Tokenizer.encode

    def watched(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.get_ident())
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    fine = {"inputs": "hello", "parameters": {"max_new_tokens": 2}}
    for body in (fine, {"inputs": ENDLESS}, {"inputs": ENDLESS}, fine):
        await client.post("/generate", json=body)
    here = [thread == threading.get_ident() for thread in threads]
    assert here == [True, True, False, False]
