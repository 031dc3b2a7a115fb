"""``suffix`` of text completions, llama.cpp's ``/infill``, and its ``timings``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tests.router import contracts
from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tests.router.test_known_parameters import REFUSED
from tests.unit.text import tiny
from tgi_cli.text.bundle import TextBundle

TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
COMPLETIONS, INFILL, CHAT = "/v1/completions", "/infill", "/v1/chat/completions"
CHAT_BODY = {"messages": [{"role": "user", "content": "hi"}]}
HI = {"prompt": "hi"}
TIMINGS = {
    "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second",
    "predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second",
}  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextBundle:
    path = tiny.write_model(tmp_path_factory.mktemp("infill"))
    backend = Backend.from_file(str(path / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(token, special=True) for token in TOKENS])
    backend.save(str(path / "tokenizer.json"))
    return TextBundle.load(path)


@pytest.fixture
def engine(text: TextBundle) -> FakeEngine:
    engine = FakeEngine(text.tokenizer, "hello\n  world\nend")
    size = text.tokenizer.vocab_size
    engine.info = replace(engine.info, max_input_tokens=199, max_total_tokens=200, vocab_size=size)
    return engine


def prompt_of(engine: FakeEngine, number: int = -1) -> str:
    ids = list(engine.requests[number].prompt_ids)
    return engine.tokenizer.decode(ids, skip_special_tokens=False)


MIDDLE = f"{tiny.BOS}<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>"
BODY = {"input_prefix": "def ", "prompt": "f(", "input_suffix": "): pass"}


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_match_the_document(client: httpx.AsyncClient, stream: bool) -> None:
    document = (await client.get("/api-doc/openapi.json")).json()
    example = document["paths"]["/infill"]["post"]["requestBody"]["content"]["application/json"]
    body = example["example"] | {"stream": stream, "timings_per_token": True}
    contract = contracts.own(document)
    for route, given in ((INFILL, body), (CHAT, CHAT_BODY | body), (COMPLETIONS, HI | body)):
        answer = await client.post(route, json=given)
        assert answer.status_code == 200, answer.text
        contract.check(f"POST {route}", answer)


class TestSuffix:
    async def test_the_answer_is_the_text_between_prompt_and_suffix(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        body = {"model": "tgi", "prompt": "def f(", "suffix": "): pass"}
        answer = await client.post(COMPLETIONS, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == "hello\n  world\nend"
        assert prompt_of(engine) == MIDDLE
        assert engine.requests[0].stop_token_ids >= {
            engine.tokenizer.backend.token_to_id(name) for name in TOKENS
        }

    async def test_prompts_may_be_several_token_ids_or_empty(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        ids = engine.tokenizer.encode("def f(", False)
        for prompts in (["def f(", ""], [ids, ids]):
            body = {"model": "tgi", "prompt": prompts, "suffix": "): pass"}
            answer = await client.post(COMPLETIONS, json=body)
            assert answer.status_code == 200, answer.text
        empty = MIDDLE.replace("def f(", "")
        assert [prompt_of(engine, n) for n in range(4)] == [MIDDLE, empty, MIDDLE, MIDDLE]

    async def test_an_empty_suffix_is_none(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await client.post(COMPLETIONS, json={"model": "tgi", "prompt": "def f(", "suffix": ""})
        assert prompt_of(engine) == f"{tiny.BOS}def f("

    @pytest.mark.parametrize("fields", [{"echo": True}, {"truncate_prompt_tokens": 5}])
    async def test_what_contradicts_a_suffix_is_refused(
        self, client: httpx.AsyncClient, fields: dict[str, Any]
    ) -> None:
        body = {"model": "tgi", "prompt": "a", "suffix": "b", **fields}
        answer = await client.post(COMPLETIONS, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "suffix"

    async def test_a_long_suffix_exceeds_the_context(self, client: httpx.AsyncClient) -> None:
        body = {"model": "tgi", "prompt": "a", "suffix": "the quick " * 2000}
        answer = await client.post(COMPLETIONS, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"

    async def test_openais_client_sends_a_suffix(self, url: str) -> None:
        ai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-")
        stream = await ai.completions.create(model="tgi", prompt="a", suffix="b", stream=True)
        assert "".join([part.choices[0].text async for part in stream]) == "hello\n  world\nend"


class TestInfill:
    async def test_answers_as_llama_cpp(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        answer = await client.post(INFILL, json=BODY)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        tokens = len(engine.replies[0])
        assert prompt_of(engine) == MIDDLE
        assert set(found.pop("timings")) == TIMINGS
        assert found == {
            "index": 0, "content": "hello\n  world\nend", "id_slot": -1, "stop": True,
            "model": "acme/tiny", "tokens_predicted": tokens,
            "tokens_evaluated": len(engine.requests[0].prompt_ids), "tokens_cached": 4,
            "has_new_line": True, "truncated": False, "stop_type": "eos", "stopping_word": "",
        }  # fmt: skip

    async def test_streams_the_text_and_ends_with_the_rest(self, client: httpx.AsyncClient) -> None:
        answer = await client.post(INFILL, json=BODY | {"stream": True, "stop": ["world"]})
        *chunks, last = events(answer.text)
        assert "".join(chunk["content"] for chunk in chunks) == "hello\n  "
        assert not any(chunk["stop"] or "timings" in chunk for chunk in chunks)
        assert (last["stop"], last["content"], last["stop_type"]) == (True, "", "word")
        assert last["stopping_word"] == "world"

    async def test_files_of_the_project_come_first(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        extra = [{"filename": "a.py", "text": "A"}, {"text": "B"}]
        await client.post(INFILL, json=BODY | {"input_extra": extra})
        files = "<|file_sep|>a.py\nA\n<|file_sep|>file\nB\n<|file_sep|>current\n"
        assert prompt_of(engine) == MIDDLE.replace(tiny.BOS, tiny.BOS + files)

    async def test_n_predict_0_only_computes_the_prompt(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        found = (await client.post(INFILL, json=BODY | {"n_predict": 0})).json()
        assert (found["content"], found["tokens_predicted"]) == ("", 0)
        assert engine.requests[0].max_new_tokens == 1

    async def test_only_named_samplers_apply(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        given = {"temperature": 0.1, "top_k": 40, "top_p": 0.9, "min_p": 0.2, "repeat_penalty": 2}
        samplers = ["top_k", "top_p", "infill"]
        answer = await client.post(INFILL, json=BODY | given | {"samplers": samplers})
        assert answer.status_code == 200, answer.text
        await client.post(INFILL, json=BODY | given | {"samplers": []})
        first, second = (request.sampling for request in engine.requests)
        values = (first.temperature, first.top_k, first.min_p, first.repetition_penalty)
        assert values == (1.0, 40, 0.0, 1.0)
        assert first.top_p == pytest.approx(0.9)
        assert (second.temperature, second.min_p) == pytest.approx((0.1, 0.2))

    @pytest.mark.parametrize("name", sorted(REFUSED.keys() - {"samplers", "response_fields"}))
    async def test_parameters_that_are_not_supported_are_refused_by_name(
        self, client: httpx.AsyncClient, engine: FakeEngine, name: str
    ) -> None:
        for value in REFUSED[name]:
            answer = await client.post(INFILL, json=BODY | {name: value})
            if name == "id_slot":  # a hint of where the prefix is cached
                assert answer.status_code == 200
                return
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == name
        assert engine.requests == []

    async def test_response_fields_selects_fields(self, client: httpx.AsyncClient) -> None:
        fields = ["content", "timings/predicted_n", "truncated", "nothing/here"]
        found = (await client.post(INFILL, json=BODY | {"response_fields": fields})).json()
        assert set(found) == {"content", "timings/predicted_n", "truncated"}
        assert found["timings/predicted_n"] > 1

    async def test_n_indent_ends_before_a_line_with_less_indentation(
        self, client: httpx.AsyncClient
    ) -> None:
        found = (await client.post(INFILL, json=BODY | {"n_indent": 2})).json()
        assert found["content"] == "hello\n  world"
        found = (await client.post(INFILL, json=BODY | {"n_indent": 3})).json()
        assert found["content"] == "hello"

    @pytest.mark.parametrize(("milliseconds", "ends"), [(1, True), (600_000, False), (0, False)])
    async def test_t_max_predict_ms_ends_the_answer_behind_a_line_break(
        self, client: httpx.AsyncClient, engine: FakeEngine, milliseconds: int, ends: bool
    ) -> None:
        engine.pause = 0.005
        body = BODY | {"t_max_predict_ms": milliseconds}
        found = (await client.post(INFILL, json=body)).json()
        assert (found["stop_type"] == "limit") is ends
        assert (found["content"] == "hello\n  world\nend") is not ends
        assert "\n" in found["content"]
        assert bool(engine.cancelled) is ends

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"samplers": ["dry"]}, "samplers"),
            ({"n": 2}, "n"),
            ({"n_indent": 2, "stream": True}, "n_indent"),
            ({"response_fields": ["content"], "stream": True}, "response_fields"),
            ({"truncate": 5}, "input_suffix"),
            ({"mirostat": 1}, "mirostat"),
            ({"input_prefix": 3}, "input_prefix"),
        ],
    )
    async def test_what_cannot_be_honoured_is_refused(
        self, client: httpx.AsyncClient, fields: dict[str, Any], param: str
    ) -> None:
        answer = await client.post(INFILL, json=BODY | fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param

    async def test_a_failure_ends_the_stream_with_an_error(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.failure, engine.fail_after = "out of blocks", 2
        answer = await client.post(INFILL, json=BODY | {"stream": True})
        assert "out of blocks" in events(answer.text)[-1]["error"]["message"]


class TestWithoutTokens:
    @pytest.fixture
    def text(self, tmp_path: Path) -> TextBundle:
        return TextBundle.load(tiny.write_model(tmp_path))

    @pytest.mark.parametrize(
        ("route", "body", "param"),
        [
            (INFILL, BODY, "input_suffix"),
            (COMPLETIONS, {"model": "tgi", "prompt": "a", "suffix": "b"}, "suffix"),
        ],
    )
    async def test_other_models_are_refused(
        self, client: httpx.AsyncClient, route: str, body: dict[str, Any], param: str
    ) -> None:
        answer = await client.post(route, json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (param, "unsupported_parameter")


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (CHAT, CHAT_BODY),
        (COMPLETIONS, HI),
    ],
)
class TestTimings:
    async def test_come_only_on_request(
        self, client: httpx.AsyncClient, engine: FakeEngine, route: str, body: dict[str, Any]
    ) -> None:
        engine.pause = 0.002
        assert "timings" not in (await client.post(route, json=body)).json()
        answer = await client.post(route, json=body | {"timings_per_token": True})
        found = answer.json()["timings"]
        usage = answer.json()["usage"]
        assert found["cache_n"] + found["prompt_n"] == usage["prompt_tokens"]
        assert found["cache_n"] == 4
        assert found["predicted_n"] == usage["completion_tokens"]
        assert found["prompt_per_second"] == pytest.approx(
            1e3 * found["prompt_n"] / found["prompt_ms"]
        )
        assert found["predicted_per_token_ms"] == pytest.approx(
            found["predicted_ms"] / found["predicted_n"]
        )
        assert found["predicted_ms"] > 0

    async def test_are_in_every_chunk_of_a_stream(
        self, client: httpx.AsyncClient, route: str, body: dict[str, Any]
    ) -> None:
        plain = await client.post(route, json=body | {"stream": True})
        assert '"timings"' not in plain.text
        options = {"stream": True, "timings_per_token": True}
        answer = await client.post(route, json=body | options)
        *chunks, done = events(answer.text)
        assert done == "[DONE]"
        counts = [chunk["timings"]["predicted_n"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] > counts[0]

    async def test_of_several_samples_count_all_tokens(
        self, client: httpx.AsyncClient, route: str, body: dict[str, Any]
    ) -> None:
        fields = {"timings_per_token": True, "n": 3, "seed": 1}
        found = (await client.post(route, json=body | fields)).json()
        assert found["timings"]["predicted_n"] == found["usage"]["completion_tokens"]
        prompt = found["timings"]["prompt_n"] + found["timings"]["cache_n"]
        assert prompt == found["usage"]["prompt_tokens"]
