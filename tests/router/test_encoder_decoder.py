"""Routes of an encoder-decoder model: the prompt is no part of what the decoder continues."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from tests.router.fakes import FakeEngine
from tgi_cli.text.bundle import TextBundle

START = 5


@pytest.fixture
def engine(text: TextBundle) -> FakeEngine:
    engine = FakeEngine(text.tokenizer)
    engine.info = replace(engine.info, decoder_start_ids=(START,))
    return engine


async def test_prefill_is_what_the_decoder_is_given(
    client: httpx.AsyncClient, engine: FakeEngine, text: TextBundle
) -> None:
    parameters = {"decoder_input_details": True, "max_new_tokens": 3}
    answer = await client.post("/generate", json={"inputs": "One two.", "parameters": parameters})
    assert answer.status_code == 200
    details = answer.json()["details"]
    assert details["prefill"] == [
        {"id": START, "text": text.tokenizer.surface(START), "logprob": None}
    ]
    assert engine.requests[0].prompt_logprobs is None
    assert engine.requests[0].prompt_ids == tuple(text.tokenizer.encode("One two."))


async def test_the_compatible_route_does_not_prepend_the_prompt(client: httpx.AsyncClient) -> None:
    body = {"inputs": "One two.", "parameters": {"max_new_tokens": 3}}
    (answer,) = (await client.post("/", json=body)).json()
    assert not answer["generated_text"].startswith("One two.")
    body["parameters"] = {"max_new_tokens": 3, "return_full_text": True}
    (answer,) = (await client.post("/", json=body)).json()
    assert answer["generated_text"].startswith("One two.")


async def test_info_names_the_pipeline(client: httpx.AsyncClient) -> None:
    assert (await client.get("/info")).json()["model_pipeline_tag"] == "text2text-generation"


async def test_log_probabilities_of_an_echo_are_refused(client: httpx.AsyncClient) -> None:
    body = {"model": "tgi", "prompt": "One two.", "echo": True, "max_tokens": 2}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    answer = await client.post("/v1/completions", json=body | {"logprobs": 1})
    assert answer.status_code == 400
    assert "encoder-decoder" in answer.json()["error"]["message"]


async def test_the_text_does_not_continue_the_prompt(
    client: httpx.AsyncClient, engine: FakeEngine, text: TextBundle
) -> None:
    """A space that the decoder would write after a word is not part of an answer that begins."""
    engine.replies = [text.tokenizer.encode("two three", add_special_tokens=False)]
    body = {"inputs": "One", "parameters": {"max_new_tokens": 20}}
    answer = await client.post("/generate", json=body)
    assert answer.json()["generated_text"] == "two three"
