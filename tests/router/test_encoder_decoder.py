"""Routes of an encoder-decoder model: the prompt is no part of what the decoder continues."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from huggingface_hub import AsyncInferenceClient

from tests.router.fakes import FakeEngine
from tests.unit.text import translation
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


class TestLanguages:
    """Of models that are told from which language to which they translate."""

    @pytest.fixture
    def text(self, tmp_path: Path) -> TextBundle:
        translation.write_nllb(tmp_path)
        return TextBundle.load(tmp_path)

    @pytest.fixture
    def engine(self, text: TextBundle) -> FakeEngine:
        engine = FakeEngine(text.tokenizer)
        end = text.tokenizer.backend.token_to_id("</s>")
        engine.info = replace(engine.info, decoder_start_ids=(end,))
        return engine

    @pytest.mark.parametrize("route", ["/", "/generate", "/generate_stream"])
    async def test_each_request_names_its_languages(
        self, client: httpx.AsyncClient, engine: FakeEngine, text: TextBundle, route: str
    ) -> None:
        id_of = text.tokenizer.backend.token_to_id
        parameters = {"src_lang": "zho_Hans", "tgt_lang": "deu_Latn"}
        for given in (parameters, {}):
            answer = await client.post(route, json={"inputs": "the", "parameters": given})
            assert answer.status_code == 200, answer.text
        named, usual = engine.requests
        assert named.prompt_ids == tuple(map(id_of, ("zho_Hans", "\u2581the", "</s>")))
        assert named.first_id == id_of("deu_Latn")
        assert usual.prompt_ids == tuple(map(id_of, ("eng_Latn", "\u2581the", "</s>")))
        assert usual.first_id is None

    async def test_the_client_of_hugging_face_translates(
        self, url: str, engine: FakeEngine, text: TextBundle
    ) -> None:
        id_of = text.tokenizer.backend.token_to_id
        engine.play([id_of("deu_Latn"), id_of("\u2581fox"), id_of("es"), 1])
        client = AsyncInferenceClient(url, timeout=60)
        answer = await client.translation("the fox", src_lang="eng_Latn", tgt_lang="zho_Hans")
        assert answer.translation_text == "foxes"
        assert engine.requests[0].first_id == id_of("zho_Hans")

    async def test_an_unknown_language_is_refused_by_name(self, client: httpx.AsyncClient) -> None:
        for name in ("src_lang", "tgt_lang"):
            body = {"inputs": "the", "parameters": {name: "fra_Latn"}}
            answer = await client.post("/generate", json=body)
            assert answer.status_code == 422
            assert f"`{name}`: the model has no such language" in answer.json()["error"]


async def test_a_model_without_languages_refuses_them(client: httpx.AsyncClient) -> None:
    body = {"inputs": "One", "parameters": {"tgt_lang": "deu_Latn"}}
    answer = await client.post("/generate", json=body)
    assert answer.status_code == 422
    assert "has no languages" in answer.json()["error"]


async def test_clients_for_translation_find_their_field(client: httpx.AsyncClient) -> None:
    (answer,) = (await client.post("/", json={"inputs": "One two."})).json()
    assert answer["translation_text"] == answer["generated_text"]
