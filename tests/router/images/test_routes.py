"""Images in the requests of every API, in front of an engine that sees."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tests.tools import fake_vision
from tests.tools.fake_vision import IMAGE, FakeImages, data_url, file_of
from tests.unit.model_server.fakes import until
from tests.unit.text import tiny
from tgi_cli.router.app import create_app
from tgi_cli.router.config import RouterConfig
from tgi_cli.text.bundle import TextBundle
from tgi_cli.vision.errors import MediaError
from tgi_cli.vision.load import Vision

CHAT = "/v1/chat/completions"


def part(rows: int, **more: Any) -> dict[str, Any]:
    """OpenAI's part of a chat."""
    return {"type": "image_url", "image_url": {"url": data_url(rows), **more}}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def turn(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def prompt_of(engine: FakeEngine, text: TextBundle) -> str:
    """The text of the last prompt, with its special tokens."""
    return text.tokenizer.decode(engine.requests[-1].prompt_ids, skip_special_tokens=False)


def rows(*counts: int) -> list[str]:
    """How images of so many rows are written in a prompt."""
    return [f"[{IMAGE * count}]" for count in counts]


def check_spans(engine: FakeEngine, text: TextBundle, *counts: int) -> None:
    """The images of the last request are at the positions of the image token, in order."""
    request = engine.requests[-1]
    index = text.tokenizer.backend.token_to_id(IMAGE)
    assert [image.num_rows for image in request.images] == list(counts)
    spans = [span for image in request.images for span in image.spans]
    places = [place for start, count in spans for place in range(start, start + count)]
    assert places == [place for place, each in enumerate(request.prompt_ids) if each == index]
    assert all(set(image.tensors) == {"pixel_values", "image_sizes"} for image in request.images)


# ---------------------------------------------------------------------- OpenAI's chats


@pytest.mark.parametrize(
    "image",
    [
        part(3),
        {"type": "image_url", "image_url": data_url(3)},
        {"type": "image_url", "image_url": data_url(3), "detail": "high"},
        {"type": "input_image", "image_url": data_url(3)},
        part(6, detail="low"),
    ],
    ids=["object", "text", "text and detail", "as in responses", "low detail"],
)
async def test_images_of_a_chat(
    client: httpx.AsyncClient, engine: FakeEngine, text: TextBundle, image: dict[str, Any]
) -> None:
    body = {"messages": [turn(words("What is "), image, words("?"))]}
    answer = await client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    (written,) = rows(3)
    assert f"<|im_start|>user\nWhat is {written}?<|im_end|>" in prompt_of(engine, text)
    check_spans(engine, text, 3)
    used = answer.json()["usage"]
    assert used["prompt_tokens"] == len(engine.requests[0].prompt_ids)


async def test_several_images_in_several_messages(
    client: httpx.AsyncClient, engine: FakeEngine, text: TextBundle
) -> None:
    body = {
        "messages": [
            turn(words("S"), part(1), role="system"),
            turn(part(2), part(3), words("a")),
            {"role": "assistant", "content": "b"},
            turn(words("c"), part(2)),
        ]
    }
    assert (await client.post(CHAT, json=body)).status_code == 200
    one, two, three, again = rows(1, 2, 3, 2)
    prompt = prompt_of(engine, text)
    assert f"S{one}<|im_end|>" in prompt
    assert f"user\n{two}{three}a<|im_end|>" in prompt
    assert f"c{again}<|im_end|>" in prompt
    check_spans(engine, text, 1, 2, 3, 2)
    first, second, _, last = engine.requests[0].images
    assert second.digest == last.digest != first.digest, "equal images have equal digests"


async def test_a_stream_with_an_image(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"messages": [turn(part(3))], "stream": True, "stream_options": {"include_usage": True}}
    found = events((await client.post(CHAT, json=body)).text)
    assert found[-2]["usage"]["prompt_tokens"] == len(engine.requests[0].prompt_ids) > 3


async def test_the_samples_of_a_prompt_share_its_images(
    client: httpx.AsyncClient, engine: FakeEngine, images: FakeImages
) -> None:
    answer = await client.post(CHAT, json={"messages": [turn(part(3))], "n": 3})
    assert len(answer.json()["choices"]) == 3
    first, *forks = engine.requests
    assert [fork.fork_of for fork in forks] == [first.request_id] * 2
    assert all(fork.images == first.images for fork in forks)
    assert len(images.seen) == 1


async def test_markdown_in_a_chat_is_text(
    client: httpx.AsyncClient, engine: FakeEngine, text: TextBundle, images: FakeImages
) -> None:
    """TGI fetched it: whoever wrote the text chose what the server requests."""
    told = f"![](http://169.254.169.254/) ![]({data_url(3)})"
    answer = await client.post(CHAT, json={"messages": [{"role": "user", "content": told}]})
    assert answer.status_code == 200
    assert told in prompt_of(engine, text)
    assert not engine.requests[0].images
    assert not images.seen


async def test_a_text_alone_is_encoded_as_ever(
    client: httpx.AsyncClient, engine: FakeEngine, text: TextBundle
) -> None:
    body = {"messages": [{"role": "user", "content": f"the tag {IMAGE}"}]}
    assert (await client.post(CHAT, json=body)).status_code == 200
    assert f"the tag {IMAGE}" in prompt_of(engine, text)
    assert not engine.requests[0].images


@pytest.mark.parametrize(
    ("parts", "cause"),
    [
        ([words(IMAGE), part(3)], "2 placeholders"),
        ([{"type": "image_url"}], "needs an `image_url`"),
        ([{"type": "image_url", "image_url": ""}], "needs an `image_url`"),
        ([part(3, detail="best")], "auto, low, high or original"),
        ([part(1)] * 5, "At most 4 image(s)"),
        ([{"type": "image_url", "image_url": "http://example.org/a.png"}], "Could not fetch"),
        ([{"type": "image_url", "image_url": "ftp://example.org/a.png"}], "invalid image content"),
        ([{"type": "image_url", "image_url": "file:///etc/passwd"}], "invalid image content"),
        ([{"type": "image_url", "image_url": "data:image/png;base64,###"}], "base64 encoding"),
        (
            [{"type": "image_url", "image_url": "data:image/png;base64,YWJj"}],
            "invalid image: it has no known format",
        ),
        ([{"type": "video_url", "video_url": {"url": "x"}}], "`video_url` is not supported"),
        ([{"type": "input_audio", "input_audio": {}}], "`input_audio` is not supported"),
        ([{"type": "audio_url", "audio_url": {"url": "x"}}], "`audio_url` is not supported"),
        ([{"type": "file", "file": {}}], "`file` is not supported"),
        ([part(500)], "maximum context length"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_had_is_refused_by_name(
    client: httpx.AsyncClient, engine: FakeEngine, parts: list[Any], cause: str, stream: bool
) -> None:
    answer = await client.post(CHAT, json={"messages": [turn(*parts)], "stream": stream})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert cause in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == "messages"
    assert engine.requests == []


async def test_errors_of_images_have_openais_codes(client: httpx.AsyncClient) -> None:
    image = {"type": "image_url", "image_url": "http://example.org/a.png"}
    answer = await client.post(CHAT, json={"messages": [turn(image)]})
    assert answer.json()["error"]["code"] == "failed_to_download_image"


async def test_the_assistant_has_no_images(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    told = [turn(words("a")), turn(part(3), role="assistant"), turn(words("b"))]
    answer = await client.post(CHAT, json={"messages": told})
    assert answer.status_code == 400
    assert "messages of the assistant may not have images" in answer.text


async def test_a_refused_request_leaves_room_for_others(
    client: httpx.AsyncClient, app: Starlette
) -> None:
    for _ in range(3):
        await client.post(CHAT, json={"messages": [turn(part(500))]})
    assert app.state.router.admission.in_flight == 0


# ---------------------------------------------------------------------- templates


class TestTemplates:
    @pytest.fixture(params=[tiny.CHAT_TEMPLATE], ids=["texts alone"])
    def text(self, request: pytest.FixtureRequest, tmp_path: Path) -> TextBundle:
        return fake_vision.bundle(tmp_path, request.param)

    async def test_a_template_of_texts_gets_the_placeholder_in_the_text(
        self, client: httpx.AsyncClient, engine: FakeEngine, text: TextBundle
    ) -> None:
        body = {"messages": [turn(words("a "), part(3), words(" b"))]}
        assert (await client.post(CHAT, json=body)).status_code == 200
        (written,) = rows(3)
        assert f"user\na {written} b<|im_end|>" in prompt_of(engine, text)
        check_spans(engine, text, 3)


class TestTemplatesThatOmitImages:
    @pytest.fixture
    def text(self, tmp_path: Path) -> TextBundle:
        once = "{% if message['role'] == 'user' %}<image>{% endif %}"
        template = fake_vision.PARTS_TEMPLATE.replace("<image>", once)
        return fake_vision.bundle(tmp_path, template)

    async def test_a_missing_placeholder_is_an_error(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        """Silently, another image would be taken for it."""
        told = [turn(words("S"), part(2), role="system"), turn(words("a"), part(3))]
        answer = await client.post(CHAT, json={"messages": told})
        assert answer.status_code == 400
        assert "1 placeholders of images, but the request has 2 images" in answer.text
        assert engine.requests == []


# ---------------------------------------------------------------------- Responses


class TestResponses:
    @staticmethod
    def image(count: int, **more: Any) -> dict[str, Any]:
        return {"type": "input_image", "image_url": data_url(count), **more}

    async def test_images_of_a_message(
        self, client: httpx.AsyncClient, engine: FakeEngine, text: TextBundle
    ) -> None:
        content = [
            {"type": "input_text", "text": "a"},
            self.image(6, detail="low"),
            self.image(2, file_id=None, detail=None),
        ]
        body = {"input": [{"role": "user", "content": content}]}
        answer = await client.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        three, two = rows(3, 2)
        assert f"user\na{three}{two}<|im_end|>" in prompt_of(engine, text)
        check_spans(engine, text, 3, 2)
        assert answer.json()["usage"]["input_tokens"] == len(engine.requests[0].prompt_ids)

    async def test_an_image_of_a_tools_output(
        self, client: httpx.AsyncClient, engine: FakeEngine, text: TextBundle
    ) -> None:
        call = {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "c1"}
        output = {"type": "function_call_output", "call_id": "c1", "output": [self.image(3)]}
        body = {"input": [{"role": "user", "content": "a"}, call, output]}
        answer = await client.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        check_spans(engine, text, 3)

    async def test_a_stored_response_keeps_its_images(
        self, client: httpx.AsyncClient, engine: FakeEngine, text: TextBundle
    ) -> None:
        body: dict[str, Any] = {"input": [{"role": "user", "content": [self.image(3)]}]}
        first = (await client.post("/v1/responses", json=body)).json()
        body = {"input": "and now?", "previous_response_id": first["id"]}
        answer = await client.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        check_spans(engine, text, 3)

    async def test_images_are_counted(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        body = {"input": [{"role": "user", "content": [self.image(3)]}]}
        counted = (await client.post("/v1/responses/input_tokens", json=body)).json()
        await client.post("/v1/responses", json=body)
        assert counted["input_tokens"] == len(engine.requests[0].prompt_ids)

    @pytest.mark.parametrize(
        ("image", "cause"),
        [
            ({"type": "input_image", "file_id": "file_1"}, "file_id"),
            ({"type": "input_image"}, "image_url"),
            ({"type": "input_image", "image_url": {"url": "data:"}}, "image_url"),
            ({"type": "input_image", "image_url": "http://example.org/a.png"}, "not fetch"),
            ({"type": "input_file", "file_data": "x"}, "input_file"),
            ({"type": "input_audio"}, "input_audio"),
        ],
    )
    async def test_others_are_refused(
        self, client: httpx.AsyncClient, engine: FakeEngine, image: dict[str, Any], cause: str
    ) -> None:
        body = {"input": [{"role": "user", "content": [image]}]}
        answer = await client.post("/v1/responses", json=body)
        assert answer.status_code == 400
        assert cause in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "input"
        assert engine.requests == []


# ---------------------------------------------------------------------- Anthropic


def anthropic_image(rows: int) -> dict[str, Any]:
    data = base64.b64encode(file_of(rows)).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


class TestMessages:
    @staticmethod
    def body(*content: Any, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": list(content)}]
        return {"model": "tgi", "max_tokens": 20, "messages": messages, **more}

    async def test_images_between_texts(
        self, client: httpx.AsyncClient, engine: FakeEngine, text: TextBundle
    ) -> None:
        content = [words("a"), words("b"), anthropic_image(3), words("c"), anthropic_image(2)]
        answer = await client.post("/v1/messages", json=self.body(*content))
        assert answer.status_code == 200, answer.text
        three, two = rows(3, 2)
        assert f"user\na\nb{three}c{two}<|im_end|>" in prompt_of(engine, text)
        check_spans(engine, text, 3, 2)
        usage = answer.json()["usage"]
        total = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert total == len(engine.requests[0].prompt_ids)

    async def test_an_image_alone_and_a_url(
        self, client: httpx.AsyncClient, engine: FakeEngine, text: TextBundle
    ) -> None:
        source = {"type": "url", "url": data_url(3)}
        body = self.body({"type": "image", "source": source})
        assert (await client.post("/v1/messages", json=body)).status_code == 200
        check_spans(engine, text, 3)

    async def test_images_of_a_tools_result(
        self, client: httpx.AsyncClient, engine: FakeEngine, text: TextBundle
    ) -> None:
        """As agents send the files that they read."""
        use = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
        result = {
            "type": "tool_result",
            "tool_use_id": "t1",
            "content": [words("here"), anthropic_image(3)],
        }
        body = self.body(words("a"))
        body["messages"] += [
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result, words("now")]},
        ]
        answer = await client.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        check_spans(engine, text, 3)
        prompt = prompt_of(engine, text)
        assert prompt.index("here") < prompt.index(IMAGE) < prompt.index("now")

    async def test_images_are_counted(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        body = self.body(words("a"), anthropic_image(3))
        counted = (await client.post("/v1/messages/count_tokens", json=body)).json()
        await client.post("/v1/messages", json=body)
        assert counted["input_tokens"] == len(engine.requests[0].prompt_ids)

    @pytest.mark.parametrize(
        ("source", "cause"),
        [
            ({"type": "file", "file_id": "file_1"}, "file_id"),
            ({"type": "url", "url": "http://example.org/a.png"}, "Could not fetch image"),
            ({"type": "base64", "data": "YWJj"}, "media_type"),
            ({"type": "base64", "media_type": "text/plain", "data": "YWJj"}, "media type"),
            ({"type": "base64", "media_type": "image/png", "data": "#"}, "base64"),
            ({"type": "url"}, "`url`"),
            ("https://example.org/a.png", "`url`"),
            (None, "`url`"),
        ],
    )
    async def test_other_sources_are_refused(
        self, client: httpx.AsyncClient, engine: FakeEngine, source: Any, cause: str
    ) -> None:
        body = self.body({"type": "image", "source": source})
        answer = await client.post("/v1/messages", json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert cause in error["message"]
        assert engine.requests == []

    async def test_a_prompt_that_is_too_long_tells_how_long(
        self, client: httpx.AsyncClient
    ) -> None:
        answer = await client.post("/v1/messages", json=self.body(anthropic_image(500)))
        assert answer.status_code == 400
        assert "prompt is too long: " in answer.json()["error"]["message"]


# ---------------------------------------------------------------------- TGI


def markdown(rows: int) -> str:
    return f"![]({data_url(rows)})"


class TestNative:
    @pytest.mark.parametrize("route", ["/generate", "/generate_stream", "/", "/invocations"])
    async def test_markdown_in_the_prompt(
        self, client: httpx.AsyncClient, engine: FakeEngine, text: TextBundle, route: str
    ) -> None:
        body = {"inputs": f"a {markdown(3)} b{markdown(2)}"}
        answer = await client.post(route, json=body)
        assert answer.status_code == 200, answer.text
        assert "error" not in answer.text
        three, two = rows(3, 2)
        assert prompt_of(engine, text) == f"{tiny.BOS}a {three} b{two}"
        check_spans(engine, text, 3, 2)
        assert engine.requests[0].sampling.greedy is False

    @pytest.mark.parametrize(
        "inputs",
        [
            [words("a "), part(3), words(" b")],
            [words("a "), {"type": "image_url", "image_url": data_url(3)}, words(" b")],
        ],
        ids=["object", "text"],
    )
    @pytest.mark.parametrize("route", ["/generate", "/generate_stream", "/"])
    async def test_mindies_lists(
        self,
        client: httpx.AsyncClient,
        engine: FakeEngine,
        text: TextBundle,
        inputs: Any,
        route: str,
    ) -> None:
        answer = await client.post(route, json={"inputs": inputs})
        assert answer.status_code == 200, answer.text
        (written,) = rows(3)
        assert prompt_of(engine, text) == f"{tiny.BOS}a {written} b"
        check_spans(engine, text, 3)

    async def test_mindies_base64_alone_and_paths(
        self, client: httpx.AsyncClient, engine: FakeEngine, images: FakeImages
    ) -> None:
        for source, expected in (
            ("iVBORw0KGgo=", "data:;base64,iVBORw0KGgo="),
            ("/9j/4AAQ", "data:;base64,/9j/4AAQ"),
            ("/data/a.jpg", "file:///data/a.jpg"),
        ):
            images.seen.clear()
            body = {"inputs": [{"type": "image_url", "image_url": source}]}
            answer = await client.post("/generate", json=body)
            assert answer.status_code == 422
            assert [image.source for image in images.seen] == [expected]
        assert engine.requests == []

    async def test_the_full_text_has_the_prompt_as_it_came(self, client: httpx.AsyncClient) -> None:
        inputs = f"a {markdown(1)}"
        parameters = {"return_full_text": True}
        answer = await client.post("/generate", json={"inputs": inputs, "parameters": parameters})
        assert answer.json()["generated_text"] == f"{inputs}hello world"
        listed = {"inputs": [words("a"), part(1), words("b")], "parameters": parameters}
        answer = await client.post("/generate", json=listed)
        assert answer.json()["generated_text"] == "abhello world"

    async def test_a_whole_image_may_be_truncated_but_no_part_of_it(
        self, client: httpx.AsyncClient, engine: FakeEngine, text: TextBundle
    ) -> None:
        inputs = f"{markdown(5)} and {markdown(2)}b"
        whole = text.tokenizer.encode(f"[{IMAGE * 5}] and [{IMAGE * 2}]b")
        after_first = len(whole) - whole.index(text.tokenizer.encode("]", False)[0]) - 1

        async def truncated(count: int) -> httpx.Response:
            parameters = {"truncate": count}
            return await client.post("/generate", json={"inputs": inputs, "parameters": parameters})

        assert (await truncated(after_first)).status_code == 200
        assert engine.requests[-1].prompt_ids == tuple(whole[-after_first:])
        check_spans(engine, text, 2)
        answer = await truncated(after_first + 3)
        assert answer.status_code == 422
        assert "cannot be truncated within an image" in answer.json()["error"]
        assert (await truncated(len(whole) + 5)).status_code == 200
        check_spans(engine, text, 5, 2)

    async def test_samples_share_the_images(
        self, client: httpx.AsyncClient, engine: FakeEngine, images: FakeImages
    ) -> None:
        parameters = {"best_of": 2, "do_sample": True, "details": True}
        body = {"inputs": markdown(3), "parameters": parameters}
        assert (await client.post("/generate", json=body)).status_code == 200
        first, second = engine.requests
        assert second.fork_of == first.request_id
        assert second.images == first.images
        assert len(images.seen) == 1

    @pytest.mark.parametrize(
        ("inputs", "cause"),
        [
            (f"a {IMAGE} {markdown(3)}", "2 placeholders"),
            ("![](a.png)", "invalid image content"),
            ("![](http://example.org/a.png)", "Could not fetch image"),
            ("![](data:image/png;base64,#)", "base64 encoding is invalid"),
            ("![](data:image/png;base64,YWJj)", "invalid image: it has no known format"),
            (markdown(1) * 5, "At most 4 image(s)"),
            (markdown(1) * 5000, "image"),
            (markdown(400), "must be <= 300"),
            ([{"type": "video_url", "video_url": "x"}], "`video_url` is not supported"),
            ([{"type": "audio_url", "audio_url": "x"}], "`audio_url` is not supported"),
            ([{"type": "image_url"}], "needs an `image_url`"),
            ([], "`inputs` cannot be empty"),
        ],
    )
    async def test_errors_have_tgis_form(
        self, client: httpx.AsyncClient, engine: FakeEngine, inputs: Any, cause: str
    ) -> None:
        body = {"inputs": inputs, "parameters": {"max_new_tokens": 1}}
        answer = await client.post("/generate", json=body)
        assert answer.status_code == 422, answer.text
        assert answer.json()["error_type"] == "validation"
        assert answer.json()["error"].startswith("Input validation error: ")
        assert cause in answer.json()["error"]
        (event,) = events((await client.post("/generate_stream", json=body)).text)
        assert cause in event["error"]
        assert engine.requests == []

    async def test_vertex_takes_both_forms(
        self, client: httpx.AsyncClient, engine: FakeEngine, text: TextBundle
    ) -> None:
        instances = [{"inputs": markdown(3)}, {"messages": [turn(part(2))]}]
        answer = await client.post("/vertex", json={"instances": instances})
        assert answer.status_code == 200, answer.text
        assert sorted(len(request.images) for request in engine.requests) == [1, 1]

    async def test_kserve_takes_markdown(
        self, client: httpx.AsyncClient, engine: FakeEngine, text: TextBundle
    ) -> None:
        tensor = {"name": "i", "shape": [1], "datatype": "BYTES", "data": [f"a{markdown(3)}"]}
        answer = await client.post("/v2/models/m/infer", json={"inputs": [tensor]})
        assert answer.status_code == 200, answer.text
        check_spans(engine, text, 3)


# ---------------------------------------------------------------------- tokenizing


class TestTokenize:
    async def test_tgis_form_has_a_token_for_each_row(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        body = {"inputs": f"a{markdown(3)}b"}
        found = (await client.post("/tokenize", json=body)).json()
        await client.post("/generate", json=body)
        assert [token["id"] for token in found] == list(engine.requests[0].prompt_ids)
        placeholder = [token for token in found if token["text"] == IMAGE]
        assert len(placeholder) == 3
        assert {(token["start"], token["stop"]) for token in placeholder} == {(2, 2 + len(IMAGE))}

    @pytest.mark.parametrize("route", ["/chat_tokenize", "/tokenize"])
    async def test_chats(self, client: httpx.AsyncClient, engine: FakeEngine, route: str) -> None:
        body = {"messages": [turn(words("a"), part(3), part(2))]}
        found = (await client.post(route, json=body)).json()
        await client.post(CHAT, json=body)
        expected = list(engine.requests[0].prompt_ids)
        if route == "/tokenize":
            assert found["tokens"] == expected
            assert found["count"] == len(expected)
        else:
            tokens = found["tokenize_response"]
            assert [token["id"] for token in tokens] == expected
            text = found["templated_text"]
            assert f"a[{IMAGE}][{IMAGE}]" in text
            assert all(text[each["start"] : each["stop"]] == each["text"] for each in tokens)

    async def test_texts_in_vllms_form_have_no_images(
        self, client: httpx.AsyncClient, text: TextBundle, images: FakeImages
    ) -> None:
        told = f"a{markdown(3)}"
        found = (await client.post("/tokenize", json={"prompt": told})).json()
        assert found["tokens"] == text.tokenizer.encode(told)
        assert not images.seen

    async def test_errors(self, client: httpx.AsyncClient) -> None:
        answer = await client.post("/tokenize", json={"inputs": "![](http://example.org/)"})
        assert answer.status_code == 422
        assert "Could not fetch image" in answer.json()["error"]


# ---------------------------------------------------------------------- models without images


class TestModelWhoseImagesAreNotServed:
    @pytest.fixture
    def app(self, engine: FakeEngine, text: TextBundle, config: RouterConfig) -> Starlette:
        return create_app(engine, text, config, Vision(reason="its encoder is not implemented"))

    @pytest.mark.parametrize(
        ("route", "body"),
        [
            (CHAT, {"messages": [turn(part(3))]}),
            ("/v1/responses", {"input": [turn(TestResponses.image(3))]}),
            ("/v1/messages", TestMessages.body(anthropic_image(3))),
            ("/generate", {"inputs": markdown(3)}),
            ("/generate", {"inputs": "![](https://example.org/a.png)"}),
            ("/generate", {"inputs": [part(3)]}),
            ("/tokenize", {"inputs": markdown(3)}),
            ("/chat_tokenize", {"messages": [turn(part(3))]}),
        ],
    )
    async def test_images_are_refused_with_the_reason(
        self, client: httpx.AsyncClient, engine: FakeEngine, route: str, body: dict[str, Any]
    ) -> None:
        answer = await client.post(route, json=body)
        assert answer.status_code in (400, 422)
        assert "not supported by this model: its encoder is not implemented" in answer.text
        assert engine.requests == []

    async def test_texts_are_answered(
        self, client: httpx.AsyncClient, engine: FakeEngine, text: TextBundle
    ) -> None:
        told = "see ![](figure.png)"
        assert (await client.post("/generate", json={"inputs": told})).status_code == 200
        assert list(engine.requests[0].prompt_ids) == text.tokenizer.encode(told)


class TestModelOfText:
    @pytest.fixture
    def app(self, engine: FakeEngine, text: TextBundle, config: RouterConfig) -> Starlette:
        return create_app(engine, text, config)

    async def test_markdown_is_text(
        self, client: httpx.AsyncClient, engine: FakeEngine, text: TextBundle
    ) -> None:
        told = markdown(1)
        assert (await client.post("/generate", json={"inputs": told})).status_code == 200
        assert list(engine.requests[0].prompt_ids) == text.tokenizer.encode(told)

    async def test_lists_of_text_are_answered_and_others_refused(
        self, client: httpx.AsyncClient, engine: FakeEngine, text: TextBundle
    ) -> None:
        body = {"inputs": [words("a"), words("b")]}
        assert (await client.post("/generate", json=body)).status_code == 200
        assert list(engine.requests[0].prompt_ids) == text.tokenizer.encode("ab")
        answer = await client.post("/generate", json={"inputs": [words("a"), part(3)]})
        assert answer.status_code == 422
        assert "`image_url` is not supported by this model: it takes text only" in answer.text


# ---------------------------------------------------------------------- resources


async def test_sources_are_freed_before_the_answer(
    client: httpx.AsyncClient, engine: FakeEngine, app: Starlette
) -> None:
    """They are megabytes, and an answer takes minutes."""
    engine.gate = asyncio.Semaphore(0)
    asked = asyncio.ensure_future(client.post(CHAT, json={"messages": [turn(part(3))]}))
    await until(lambda: bool(app.state.router.generator.live))
    (generation,) = app.state.router.generator.live
    assert generation.spec.images == []
    for _ in range(20):
        engine.gate.release()
    assert (await asked).status_code == 200


async def test_the_processes_end_with_the_server(app: Starlette, images: FakeImages) -> None:
    state = app.state.router
    # The chat template is shared with other tests.
    await replace(state, text=replace(state.text, chat_template=None)).close()
    assert images.closed


async def test_a_busy_image_service_is_no_error_of_the_request(
    client: httpx.AsyncClient, images: FakeImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def busy(_: Any) -> Any:
        raise MediaError("too many images are being processed", unavailable=True)

    monkeypatch.setattr(images, "process", busy)
    answer = await client.post(CHAT, json={"messages": [turn(part(3))]})
    assert answer.status_code == 503
    assert "too many images" in answer.text
    assert int(answer.headers["retry-after"]) > 0


async def test_an_engine_that_restarts_meanwhile_gets_the_images(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    text: TextBundle,
    images: FakeImages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = images.process

    async def slow(parts: Any) -> Any:
        engine.restart(max_input_tokens=249, max_total_tokens=250)
        return await process(parts)

    monkeypatch.setattr(images, "process", slow)
    answer = await client.post(CHAT, json={"messages": [turn(part(3))], "max_tokens": 5})
    assert answer.status_code == 200
    check_spans(engine, text, 3)
