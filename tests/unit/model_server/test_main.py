"""The model server's process around a worker without a model: rules, statistics, reasons."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.fake_worker import FakeWorker
from tests.unit.model_server.fakes import INFO, request
from tgi_cli.config import DeviceFacts, EngineConfig, ModelFacts, ServeConfig, resolve
from tgi_cli.engine.metrics import EngineLoad
from tgi_cli.errors import ShardError, TgiError
from tgi_cli.model_server.config import ModelServerConfig
from tgi_cli.model_server.main import run_model_server
from tgi_cli.rpc.client import GrpcEngineClient
from tgi_cli.worker import factory
from tgi_cli.worker.sizing.kv_cache import Capacity

MODEL = ModelFacts(
    architecture="LlamaForCausalLM",
    model_type="llama",
    dtype="float32",
    vocab_size=1000,
    max_position_embeddings=256,
    eos_token_ids=(),
    kv_bytes_per_token=8,
)
CPU = DeviceFacts(kind="cpu", name="cpu", total_memory=1 << 34, native_bfloat16=False)
BLOCKS = 64


def model_server_config(uds_path: Path, **settings: Any) -> ModelServerConfig:
    serve = ServeConfig(model_id="m", **settings)
    return ModelServerConfig(serve=serve, model_path=Path("/m"), uds_path=uds_path)


class _Worker(FakeWorker):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config.block_size)
        self.config = config
        self.closed = False
        self.on_lost: Callable[[TgiError], None] | None = None

    def warmup(self) -> Capacity:
        return Capacity(
            config=self.config,
            num_blocks=BLOCKS,
            cache_bytes=BLOCKS << 20,
            weight_bytes=0,
            activation_bytes=0,
            load_seconds=0.0,
            warmup_seconds=0.0,
        )

    def watch(self, on_lost: Callable[[TgiError], None]) -> None:
        self.on_lost = on_lost

    def close(self) -> None:
        self.closed = True

    def info(self) -> Any:
        return replace(INFO, vocab_size=1000, max_input_tokens=255, max_total_tokens=256)


async def _talk(path: Path, prompts: list[range], new_tokens: int) -> EngineLoad:
    """Submit all at once, read all to the end."""
    client = await GrpcEngineClient.connect(f"unix:{path}", timeout=60)
    try:
        streams = [
            client.submit(request(i, prompt_ids=tuple(prompt), max_new_tokens=new_tokens))
            for i, prompt in enumerate(prompts)
        ]
        async with asyncio.timeout(30):
            for stream in streams:
                async for batch in stream:
                    if batch.finished is not None:
                        assert not batch.finished.error
        return (await client.metrics()).load
    finally:
        await client.close()


def _served(
    monkeypatch: pytest.MonkeyPatch, prompts: list[range], new_tokens: int, **settings: Any
) -> tuple[EngineLoad, _Worker]:
    """The load that a client saw last of a server that has run and stopped, and its worker."""
    workers: list[_Worker] = []

    def load(serve: ServeConfig, path: Path, _progress: object) -> tuple[_Worker, EngineConfig]:
        config = resolve(serve, MODEL, CPU, path)
        workers.append(_Worker(config))
        return workers[0], config

    monkeypatch.setattr(factory, "load_worker", load)
    seen: list[EngineLoad] = []

    with tempfile.TemporaryDirectory(prefix="tgi-test-") as folder:
        path = Path(folder) / "engine.sock"

        def talk() -> None:
            try:
                for prompt in prompts:
                    seen.append(asyncio.run(_talk(path, [prompt], new_tokens)))
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        before = signal.getsignal(signal.SIGTERM)
        talker = threading.Thread(target=talk)
        talker.start()
        try:
            run_model_server(model_server_config(path, **settings))
        finally:
            talker.join(timeout=60)
            signal.signal(signal.SIGTERM, before)
    assert len(seen) == len(prompts)
    assert workers[0].closed
    return seen[-1], workers[0]


def test_totals_reach_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    load, worker = _served(monkeypatch, [range(40), range(45)], 3)
    assert load.prompt_tokens == 85
    assert load.reused_tokens == 32, "two blocks of the second prompt were the first's"
    assert load.context_tokens == 85 - 32
    assert load.cached_blocks == 2
    assert load.steps == len(worker.steps) == 6


def test_the_batching_policy_reaches_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt longer than a chunk: several steps with fused, one with inflight."""
    limits = {"max_batch_prefill_tokens": 50, "max_total_tokens": 256}
    _, fused = _served(monkeypatch, [range(120)], 2, **limits)
    assert [step.num_tokens for step in fused.steps] == [50, 50, 20, 1]
    _, inflight = _served(monkeypatch, [range(120)], 2, batching="inflight")
    assert [step.num_tokens for step in inflight.steps] == [120, 1]


def test_every_step_is_logged_at_debug_level_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def statistics() -> list[dict[str, Any]]:
        messages = [r.getMessage() for r in caplog.records if r.name == "tgi_cli.engine.core"]
        caplog.clear()
        return [json.loads(line) for line in messages]

    with caplog.at_level(logging.INFO, logger="tgi_cli"):
        _served(monkeypatch, [range(8)], 2)
        assert "max_total_tokens 256: the model's context" in caplog.text
        assert "KV cache 64 blocks of 16 tokens (1024 tokens): 64.0 MiB" in caplog.text
        assert statistics() == []
    with caplog.at_level(logging.DEBUG, logger="tgi_cli"):
        _served(monkeypatch, [range(8)], 2)
    assert [(s["Iteration Counter"], s["Total Context Tokens"]) for s in statistics()] == [
        (1, 8),
        (2, 0),
    ]


def test_a_lost_shard_ends_the_server_and_clients_get_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lost in the middle of a step: the loop hears of it twice, clients once."""
    lost = ShardError("shard 1 was killed by SIGKILL", "see its log above")
    workers: list[_Worker] = []

    def load(serve: ServeConfig, path: Path, _progress: object) -> tuple[_Worker, EngineConfig]:
        workers.append(_Worker(resolve(serve, MODEL, CPU, path)))
        workers[0].fail_when = lose
        return workers[0], workers[0].config

    def lose(_step: object) -> Exception:
        on_lost = workers[0].on_lost
        assert on_lost is not None
        on_lost(lost)
        return lost  # what waits for a shard in an operation fails when the shard is gone

    async def ask(path: Path) -> str:
        client = await GrpcEngineClient.connect(f"unix:{path}", timeout=60)
        try:
            async with asyncio.timeout(30):
                async for batch in client.submit(request(1, prompt_ids=(1, 2), max_new_tokens=9)):
                    if batch.finished is not None:
                        return batch.finished.error
        finally:
            await client.close()
        return "the stream ended without a word"

    monkeypatch.setattr(factory, "load_worker", load)
    messages: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    with tempfile.TemporaryDirectory(prefix="tgi-test-") as folder:
        path = Path(folder) / "engine.sock"
        client = threading.Thread(target=lambda: messages.append(asyncio.run(ask(path))))
        client.start()
        try:
            with pytest.raises(ShardError) as caught:
                run_model_server(model_server_config(path))
        finally:
            client.join(timeout=60)
            signal.signal(signal.SIGTERM, before)
    assert (caught.value.cause, caught.value.remedy) == (lost.cause, lost.remedy)
    assert messages == [lost.cause]
    assert workers[0].closed
