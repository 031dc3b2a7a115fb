"""LoRA adapters on a real server: named at the start, loaded while it runs, mixed in a batch."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from huggingface_hub import InferenceClient

from tests.system.conftest import StartServer
from tests.system.test_serve import errors_in
from tests.tools.checkpoints import make_llama
from tests.tools.lora_adapters import make_adapter
from tests.tools.server_process import ServerProcess, poll
from tgi_cli import demo
from tgi_cli.errors import ExitCode

KEY = "s3cret"
AUTH = {"authorization": f"Bearer {KEY}"}
PROMPTS = ["def read_json(path):", "The function returns", "import os", "class Parser:"]
NAMES = ("zero", "one", "two")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters") / "base"
    return make_llama(path, vocab_size=4096, tokenizer=demo.model_path())


@pytest.fixture(scope="module")
def folders(base: Path) -> dict[str, Path]:
    return {
        name: make_adapter(base, base.parent / name, seed=seed, rank=4 + seed)
        for seed, name in enumerate([*NAMES, "late"])
    }


@pytest.fixture(scope="module")
def server(
    start_server: StartServer, base: Path, folders: dict[str, Path]
) -> Iterator[ServerProcess]:
    """Three adapters, of which two at a time have a place on the device."""
    named = ",".join(f"{name}={folders[name]}" for name in NAMES)
    limits = ["--max-loras", "2", "--dtype", "float32", "--max-batch-total-tokens", "8192"]
    server = start_server(str(base), "--lora-adapters", named, *limits, API_KEY=KEY)
    server.wait_ready()
    yield server
    server.kill()


async def tokens(client: httpx.AsyncClient, prompt: str, adapter_id: str | None) -> list[int]:
    parameters = {"max_new_tokens": 12, "details": True, "adapter_id": adapter_id}
    body = {"inputs": prompt, "parameters": parameters}
    answer = await client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return [token["id"] for token in answer.json()["details"]["tokens"]]


async def test_a_mixed_batch_says_what_each_says_alone(server: ServerProcess) -> None:
    asked = [(prompt, name) for prompt in PROMPTS for name in (*NAMES, None)]
    async with httpx.AsyncClient(base_url=server.url, headers=AUTH, timeout=120) as client:
        alone = [await tokens(client, prompt, name) for prompt, name in asked]
        together = await asyncio.gather(*(tokens(client, *one) for one in asked))
    assert alone == list(together)
    for place in range(0, len(asked), 4):
        assert len({tuple(ids) for ids in alone[place : place + 4]}) == 4, "they differ"


async def test_openais_and_huggingfaces_clients_choose_one(server: ServerProcess) -> None:
    async with httpx.AsyncClient(base_url=server.url, headers=AUTH, timeout=120) as raw:
        texts = {}
        for name in (*NAMES, None):
            body = {"inputs": PROMPTS[0], "parameters": {"max_new_tokens": 8, "adapter_id": name}}
            texts[name] = (await raw.post("/generate", json=body)).json()["generated_text"]
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    listed = client.models.list().data
    assert [model.id for model in listed[1:]] == list(NAMES)
    for name in (*NAMES, None):
        model = name or listed[0].id
        completion = client.completions.create(
            model=model, prompt=PROMPTS[0], max_tokens=8, temperature=0
        )
        assert completion.choices[0].text == texts[name]
        assert completion.model == model
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    chats = {
        model: client.chat.completions.create(
            model=model, messages=messages, max_tokens=12, temperature=0
        )
        .choices[0]
        .message.content
        for model in ("zero", "one", "tgi")
    }
    assert len(set(chats.values())) == 3
    with pytest.raises(openai.NotFoundError, match="gpt-9") as caught:
        client.chat.completions.create(model="gpt-9", messages=messages)
    assert caught.value.code == "model_not_found"

    hub = InferenceClient(server.url, token=KEY)
    for name in ("one", None):
        text = hub.text_generation(PROMPTS[0], max_new_tokens=8, adapter_id=name)
        assert text == PROMPTS[0] + texts[name], "its route puts the prompt in front"


async def test_loading_and_unloading_while_it_runs(
    server: ServerProcess, folders: dict[str, Path]
) -> None:
    load = {"lora_name": "late", "lora_path": str(folders["late"])}
    async with httpx.AsyncClient(base_url=server.url, headers=AUTH, timeout=120) as client:
        before = await tokens(client, PROMPTS[0], "one")
        refused = await client.post(
            "/generate", json={"inputs": "x", "parameters": {"adapter_id": "late"}}
        )
        assert refused.status_code == 422
        assert "adapters: one, two, zero" in refused.json()["error"]
        answer = await client.post("/v1/load_lora_adapter", json=load)
        assert (answer.status_code, answer.text) == (
            200,
            "Success: LoRA adapter 'late' added successfully.",
        )
        late = await tokens(client, PROMPTS[0], "late")
        assert late != before
        assert "\ntgi_lora_adapters 4\n" in (await client.get("/metrics")).text
        assert (await client.post("/v1/load_lora_adapter", json=load)).status_code == 400
        # Another adapter under the same name: nothing that is cached of the old one serves it.
        swap = load | {"lora_path": str(folders["one"]), "load_inplace": True}
        assert (await client.post("/v1/load_lora_adapter", json=swap)).status_code == 200
        assert await tokens(client, PROMPTS[0], "late") == before
        nowhere = {"lora_name": "nowhere", "lora_path": "/no/such/folder"}
        answer = await client.post("/v1/load_lora_adapter", json=nowhere)
        assert answer.status_code == 404
        assert "/no/such/folder" in answer.json()["error"]["message"]
        unload = {"lora_name": "late"}
        answer = await client.post("/v1/unload_lora_adapter", json=unload)
        assert answer.status_code == 200
        assert (await client.post("/v1/unload_lora_adapter", json=unload)).status_code == 404
        refused = await client.post("/v1/completions", json={"model": "late", "prompt": "x"})
        assert refused.status_code == 404
        assert await tokens(client, PROMPTS[0], "one") == before
        del client.headers["authorization"]
        assert (await client.post("/v1/load_lora_adapter", json=load)).status_code == 401
        assert (await client.post("/generate", json={"inputs": "x"})).status_code == 401


async def test_a_stream_outlives_the_unloading_of_its_adapter(
    server: ServerProcess, folders: dict[str, Path]
) -> None:
    async with httpx.AsyncClient(base_url=server.url, headers=AUTH, timeout=120) as client:
        load = {"lora_name": "short", "lora_path": str(folders["late"])}
        assert (await client.post("/v1/load_lora_adapter", json=load)).status_code == 200
        body = {"inputs": "import", "parameters": {"max_new_tokens": 300, "adapter_id": "short"}}
        whole = (await client.post("/generate", json=body)).json()["generated_text"]
        async with client.stream("POST", "/generate_stream", json=body) as answer:
            lines = (line async for line in answer.aiter_lines() if line.startswith("data:"))
            await anext(lines)
            unload = {"lora_name": "short"}
            assert (await client.post("/v1/unload_lora_adapter", json=unload)).status_code == 200
            last = [json.loads(line[5:]) async for line in lines][-1]
        assert last["generated_text"] == whole


def test_the_line_to_try_brings_the_key(server: ServerProcess) -> None:
    poll(lambda: "\n  curl " in server.log, 60, "the line comes, behind the ready line")
    line = next(line for line in server.log.splitlines() if line.strip().startswith("curl "))
    done = subprocess.run(
        ["bash", "-c", f"{line} -sS"],
        env={**os.environ, "API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "generated_text" in json.loads(done.stdout)


def test_the_key_shows_in_no_process_and_no_log(server: ServerProcess) -> None:
    for pid in server.children():
        assert KEY not in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
    model_server = Path(f"/proc/{server.child('model-server')}/environ").read_bytes()
    assert KEY.encode() not in model_server
    assert KEY not in server.log


def test_an_adapter_that_cannot_be_used_ends_the_start(
    start_server: StartServer, base: Path, tmp_path: Path
) -> None:
    path = make_adapter(base, tmp_path / "dora", modules=("q_proj",), use_dora=True)
    server = start_server(str(base), "--lora-adapters", f"dora={path}")
    assert server.wait() == ExitCode.MODEL_UNUSABLE
    (line,) = errors_in(server.log)
    assert line.startswith("error: adapter 'dora': ")
    assert "DoRA" in line
    assert "Traceback" not in server.log
    assert list(server.runtime.iterdir()) == []
