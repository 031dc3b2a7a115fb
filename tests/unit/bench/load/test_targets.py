"""What is behind an address."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.unit.bench.load.fake_server import Call, FakeServer, Handler, Reply
from tests.unit.bench.load.fake_shard import FakeShard
from tgi_cli import demo
from tgi_cli.bench.settings import RequestSettings
from tgi_cli.bench.targets import resolve_target
from tgi_cli.errors import ConfigError, ModelError, RouterError, ShardError


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def routes(**answers: Any) -> Handler:
    """JSON by path, slashes as underscores; all others are missing."""

    async def handle(call: Call, reply: Reply) -> None:
        answer = answers.get(call.path.strip("/").replace("/", "_"))
        if callable(answer):
            answer = answer(call.body)
        if answer is None:
            await reply.whole(404, {"detail": "Not Found"})
        elif isinstance(answer, int):
            await reply.whole(answer, {})
        else:
            await reply.whole(200, json.dumps(answer))

    return handle


DEMO_INFO = {"model_id": demo.MODEL_ID, "version": "9"}


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_tgi_is_known_by_its_info(suffix: str) -> None:
    with FakeServer(routes(info=DEMO_INFO)).serving() as server:
        found = await resolve_target(
            server.url + suffix, RequestSettings(api_key="k"), started_here=["tgi"]
        )
    assert (found.target.kind, found.target.model) == ("tgi", demo.MODEL_ID)
    assert found.target.address == server.url
    assert found.target.info == DEMO_INFO
    assert found.target.started_here == ["tgi"]
    assert found.tokenizer.exact
    assert found.tokenizer.count("hello") > 0
    assert found.notes == []
    assert server.calls[0].headers["authorization"] == "Bearer k"


async def test_openai_is_known_by_its_models() -> None:
    listed = {"data": [{"id": "acme/one"}, {"id": "acme/two", "max_model_len": 5}]}
    with FakeServer(routes(v1_models=listed)).serving() as server:
        first = await resolve_target(server.url, RequestSettings())
        second = await resolve_target(
            server.url, RequestSettings(model="acme/two"), tokenizer_name=str(demo.model_path())
        )
    assert (first.target.kind, first.target.model) == ("openai", "acme/one")
    assert not first.tokenizer.exact
    assert "estimates" in first.notes[0]
    assert second.target.info["max_model_len"] == 5
    assert second.tokenizer.exact
    assert second.notes == []


def tgi_tokenize(body: Any) -> Any:
    return [0, *body["inputs"].split()] if "inputs" in body else None


def vllm_tokenize(body: Any) -> Any:
    if "prompt" not in body:
        return None
    return {"count": len(body["prompt"].split()) + 1, "max_model_len": 9}


def llama_tokenize(body: Any) -> Any:
    return {"tokens": [0, *body["content"].split()]} if "content" in body else None


@pytest.mark.parametrize("tokenize", [tgi_tokenize, vllm_tokenize, llama_tokenize])
async def test_servers_count_tokens_if_there_is_no_tokenizer(tokenize: Any) -> None:
    listed = {"data": [{"id": "acme/one"}]}
    with FakeServer(routes(v1_models=listed, tokenize=tokenize)).serving() as server:
        found = await resolve_target(server.url, RequestSettings())
        counter = found.tokenizer
        assert counter.exact
        assert [counter.count("a b c"), counter.count("a b c", special=False)] == [4, 3]
        assert [counter.count(""), counter.count("", special=False)] == [1, 0]
        assert len(counter.words()) > 100
    assert "/tokenize" in found.notes[0]
    with pytest.raises(RouterError):
        counter.count("the server has gone")


async def test_a_server_that_is_neither_is_refused() -> None:
    with FakeServer(routes()).serving() as server:
        with pytest.raises(ConfigError, match="neither TGI's /info"):
            await resolve_target(server.url, RequestSettings())
        named = await resolve_target(server.url, RequestSettings(model="mine"))
    assert (named.target.kind, named.target.model) == ("openai", "mine")


async def test_unreachable_servers_are_errors() -> None:
    server = FakeServer(routes(info=401))
    with server.serving(), pytest.raises(RouterError, match="401"):
        await resolve_target(server.url, RequestSettings())
    with pytest.raises(RouterError, match="cannot be reached"):
        await resolve_target(server.url, RequestSettings())
    with pytest.raises(ConfigError, match="neither a URL nor"):
        await resolve_target("localhost:3000", RequestSettings())


async def test_a_tokenizer_that_is_named_must_be_there(tmp_path: Path) -> None:
    with FakeServer(routes(info=DEMO_INFO)).serving() as server, pytest.raises(ModelError):
        await resolve_target(server.url, RequestSettings(), tokenizer_name=str(tmp_path))


async def test_shards_are_resolved_with_their_info() -> None:
    with tempfile.TemporaryDirectory(prefix="tgi-") as folder:
        path = Path(folder) / "shard-0"
        settings = RequestSettings(connect_timeout=30)
        with FakeShard().serving(path):
            found = await resolve_target(f"unix://{path}", settings, tokenizer_name=demo.MODEL_ID)
            with pytest.raises(ConfigError, match="model of the shard"):
                await resolve_target(str(path), settings)
        assert (found.target.kind, found.target.address) == ("shard-v3", str(path))
        assert found.target.model == demo.MODEL_ID
        assert found.target.info["block_size"] == 16
        assert found.tokenizer.exact
        with pytest.raises(ShardError, match="no socket"):
            await resolve_target(f"{folder}/shard", settings)
