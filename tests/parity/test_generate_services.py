"""TGI's own services over a real model: what transformers says, however the caller drives them.

The client is made from the services' reflection at run time. A miniature checkpoint of random
weights in fp32 stands behind them; both services of the server share it.
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from tests.tools.checkpoints import make_llama
from tests.tools.grpc_reflection import ReflectionClient
from tests.tools.thread_stages import with_pipeline
from tests.unit.tgi_grpc.fakes import V2, V3, Heard
from tgi_cli import demo
from tgi_cli.config import ServeConfig
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.core import EngineCore
from tgi_cli.engine.messages import GenerationRequest, Shutdown
from tgi_cli.model_server.grpc_server import EngineServer
from tgi_cli.model_server.grpc_service import ServedEngine
from tgi_cli.rpc.client import GrpcEngineClient
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.tgi_grpc.model_text import load_model_text
from tgi_cli.tgi_grpc.mount import GenerateOptions, GenerateServices
from tgi_cli.worker.factory import load_worker, resolve_config
from tgi_cli.worker.sizing.kv_cache import Capacity
from tgi_cli.worker.tensor_parallel.pipeline import PipelinedWorker
from tgi_cli.worker.worker import ModelWorker

NEW = 12
TEXT = "the quick def return import self value of list path error with file None for in is"
WORDS = TEXT.split()
SERVE = ServeConfig(
    model_id="llama",
    dtype="float32",
    max_total_tokens=192,
    max_batch_prefill_tokens=48,
    max_batch_total_tokens=4096,
    max_batch_size=8,
)


class Oracle:
    """What transformers says to a prompt, alone."""

    def __init__(self, path: Path) -> None:
        self.model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self._known: dict[tuple[int, ...], list[int]] = {}

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def answer(self, ids: list[int], new: int = NEW) -> list[int]:
        known = self._known.get(tuple(ids), [])
        if len(known) < new:
            prompt = torch.tensor([ids])
            with torch.inference_mode():
                out = self.model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=new,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            known = self._known[tuple(ids)] = out[0, len(ids) :].tolist()
        return known[:new]

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """Of every token that may follow, at each position: [T, V]."""
        with torch.inference_mode():
            return torch.log_softmax(self.model(torch.tensor([ids])).logits[0].float(), -1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    return make_llama(path, seed=11, vocab_size=4096, tokenizer=demo.model_path())


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


@pytest.fixture(scope="module")
def worker(checkpoint: Path) -> ModelWorker:
    worker, _ = load_worker(SERVE, checkpoint)
    worker.warmup()
    return worker


@contextmanager
def served(
    worker: ModelWorker | PipelinedWorker, path: Path, depth: int = 0, **changes: Any
) -> Iterator[str]:
    """The target of a server around the worker; nothing must be held in it at the end."""
    values: dict[str, Any] = {
        "max_total_tokens": 192,
        "max_batch_prefill_tokens": 48,
        "max_batch_size": 8,
        "block_size": 16,
        "num_blocks": 256,
    }
    core = EngineCore(worker, SchedulerConfig(**(values | changes)), depth, worker.grammars)
    info = worker.info()
    with tempfile.TemporaryDirectory(prefix="tgi-test-") as folder:
        socket = Path(folder) / "engine.sock"
        server = EngineServer(core, info)
        options = GenerateOptions(load_text=partial(load_model_text, path, False))
        served = ServedEngine(core.inbox, info, server.adapters, socket)
        server.services.append(GenerateServices(served, options))
        server.start(socket)
        loop = threading.Thread(target=core.run, daemon=True)
        loop.start()
        try:
            yield f"unix:{socket}"
        finally:
            core.inbox.put(Shutdown())
            loop.join(timeout=60)
            server.stop()
    assert core.metrics.load.used_blocks == 0


def some_text(dice: random.Random, length: int) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(length))


def a_request(
    client: ReflectionClient, request_id: int, text: str, new: int = NEW, **more: Any
) -> Any:
    stopping = {"max_new_tokens": new, "ignore_eos_token": True}
    if client.descriptor.full_name == V3:
        more = {"add_special_tokens": True} | more
    return client.message(
        "Request", id=request_id, inputs=text, stopping_parameters=stopping, **more
    )


def prefill(client: ReflectionClient, batch_id: int, *requests: Any, **more: Any) -> Any:
    batch = client.message("Batch", id=batch_id, requests=requests, size=len(requests))
    return client.Prefill(batch=batch, **more)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("service", [V2, V3])
def test_the_call_flow_generates_what_single_requests_do(
    worker: ModelWorker, checkpoint: Path, oracle: Oracle, service: str, depth: int
) -> None:
    """Three clients, of which one leaves and one never receives: TGI's architecture document."""
    texts = {1: "def read(path):", 2: "import os and return the list of", 3: "class Parser"}
    heard = Heard()
    with served(worker, checkpoint, depth) as target, ReflectionClient(target, service) as client:
        client.Warmup(max_prefill_tokens=48)
        batch1 = heard(prefill(client, 1, a_request(client, 1, texts[1], 40))).batch
        for _ in range(2):
            batch1 = heard(client.Decode(batches=[batch1])).batch
        batch2 = heard(prefill(client, 2, a_request(client, 2, texts[2]))).batch
        both = heard(client.Decode(batches=[batch1, batch2])).batch
        left = client.FilterBatch(batch_id=both.id, request_ids=[2]).batch
        left = heard(client.Decode(batches=[left])).batch
        heard(prefill(client, 3, a_request(client, 3, texts[3])))
        client.ClearCache(id=3)
        heard.run_out(client, left)
        client.ClearCache()
    ids = {i: oracle.ids(text) for i, text in texts.items()}
    assert heard.ids[1] == oracle.answer(ids[1], 4)
    assert heard.ids[2] == oracle.answer(ids[2])
    assert heard.ids[3] == oracle.answer(ids[3], 1)
    whole = oracle.tokenizer.decode(ids[2] + heard.ids[2])
    assert heard.ends[2].text == whole[len(oracle.tokenizer.decode(ids[2])) :]


def test_chunks_joins_and_a_shared_prefix_change_nothing(
    worker: ModelWorker, checkpoint: Path, oracle: Oracle
) -> None:
    dice = random.Random(5)
    prefix = some_text(dice, 60)
    texts = {i: prefix + " " + some_text(dice, 8 + 9 * i) for i in range(4)}
    ids = {i: oracle.ids(text) for i, text in texts.items()}
    assert max(map(len, ids.values())) > 96, "longer than two steps may be"
    heard = Heard()
    with served(worker, checkpoint) as target, ReflectionClient(target, V3) as client:
        batch = heard(prefill(client, 0, a_request(client, 0, texts[0], 30))).batch
        for i in range(1, 4):
            late = a_request(client, i, texts[i], chunk_len=10 * i, cache_len=0)
            batch = heard(prefill(client, i, late, cached_batch=batch)).batch
            batch = heard(client.Decode(batches=[batch])).batch
        heard.run_out(client, batch)
    assert heard.ids == {i: oracle.answer(ids[i], 30 if i == 0 else NEW) for i in texts}


def test_log_probabilities_are_the_models_own(
    worker: ModelWorker, checkpoint: Path, oracle: Oracle
) -> None:
    text = some_text(random.Random(3), 70)
    ids = oracle.ids(text)
    expected = oracle.logprobs(ids)
    with served(worker, checkpoint) as target, ReflectionClient(target, V3) as client:
        for _ in range(2):  # the second time, it is cached
            asked = a_request(client, 1, text, 1, prefill_logprobs=True, top_n_tokens=3)
            (generation,) = prefill(client, 1, asked).generations
            scored = generation.prefill_tokens
            assert list(scored.ids) == ids
            assert math.isnan(scored.logprobs[0])
            own = expected[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
            assert torch.allclose(torch.tensor(scored.logprobs[1:]), own, atol=1e-4)
            (top,) = generation.top_tokens
            best = expected[-1].topk(3)
            assert list(top.ids) == best.indices.tolist()
            assert torch.allclose(torch.tensor(list(top.logprobs)), best.values, atol=1e-4)
            assert list(generation.tokens.ids) == [top.ids[0]]
            assert math.isclose(generation.tokens.logprobs[0], top.logprobs[0], abs_tol=1e-5)


def test_a_seed_gives_the_same_tokens_in_any_batch(worker: ModelWorker, checkpoint: Path) -> None:
    parameters = {"do_sample": True, "temperature": 0.9, "top_k": 50, "seed": 42}
    with served(worker, checkpoint) as target, ReflectionClient(target, V3) as client:
        said = []
        for others in range(3):
            heard = Heard()
            requests = [a_request(client, 0, "def f(", parameters=parameters)]
            requests += [a_request(client, i, WORDS[i]) for i in range(1, 1 + others)]
            heard.run_out(client, heard(prefill(client, 0, *requests)).batch)
            assert heard.ends[0].seed == 42
            said.append(heard.ids[0])
    assert said[0] == said[1] == said[2]


def test_grammars_hold(worker: ModelWorker, checkpoint: Path) -> None:
    parameters = {"grammar": "(yes|no), [0-9]{3}", "grammar_type": 2}
    with served(worker, checkpoint) as target, ReflectionClient(target, V3) as client:
        heard = Heard()
        asked = client.message(
            "Request",
            id=1,
            inputs="def f(",
            stopping_parameters={"max_new_tokens": 30},
            parameters=parameters,
        )
        heard.run_out(client, heard(prefill(client, 0, asked)).batch)
        text = heard.ends[1].text
        assert text[:-3] in ("yes, ", "no, ")
        assert text[-3:].isdigit()
        asked.parameters.grammar = "(("
        with pytest.raises(grpc.RpcError) as caught:
            prefill(client, 0, asked)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details().startswith("request 1: its grammar is not valid")


@pytest.mark.parametrize(("depth", "num_blocks"), [(0, 256), (1, 36), (0, 36)])
def test_both_services_at_once_under_random_load(
    worker: ModelWorker, checkpoint: Path, oracle: Oracle, depth: int, num_blocks: int
) -> None:
    """Sessions and two step-driven callers; with few blocks, the sessions' are preempted."""
    under_random_load(worker, checkpoint, oracle, depth, num_blocks=num_blocks)


def test_both_services_at_once_on_two_stages(checkpoint: Path, oracle: Oracle) -> None:
    """The same while the sessions' steps are in flight through the stages."""
    config, _ = resolve_config(replace(SERVE, pipeline_parallel_size=2), checkpoint)

    def use(worker: PipelinedWorker, _: Capacity) -> None:
        changes = {"num_blocks": 36, "pipeline_parallel_size": 2}
        under_random_load(worker, checkpoint, oracle, config.depth, **changes)

    with_pipeline(config, 1, use)


def under_random_load(
    worker: ModelWorker | PipelinedWorker,
    checkpoint: Path,
    oracle: Oracle,
    depth: int,
    **changes: int,
) -> None:
    dice = random.Random(depth * 1000 + changes["num_blocks"])
    texts = [some_text(dice, dice.randrange(1, 50)) for _ in range(30)]
    ids = [oracle.ids(text) for text in texts]
    assert max(map(len, ids)) + NEW <= 6 * 16, "two callers with three each always fit"
    failures: list[BaseException] = []

    async def session(target: str) -> None:
        client = await GrpcEngineClient.connect(target, timeout=30)

        async def one(i: int) -> None:
            request = GenerationRequest(
                request_id=i,
                prompt_ids=tuple(ids[i]),
                sampling=SamplingParams(temperature=0.0),
                max_new_tokens=NEW,
            )
            said: list[int] = []
            async for batch in client.submit(request):
                said += batch.token_ids
            assert said == oracle.answer(ids[i])

        try:
            async with asyncio.timeout(120):
                await asyncio.gather(*(one(i) for i in range(len(ids))))
        finally:
            await client.close()

    def drive(target: str, service: str, seed: int) -> None:
        dice = random.Random(seed)
        with ReflectionClient(target, service) as client:
            for turn in range(6):
                heard = Heard()
                chosen = dice.sample(range(len(ids)), dice.randrange(1, 4))
                requests = [a_request(client, i, texts[i]) for i in chosen]
                batch = heard(prefill(client, 10 * seed + turn, *requests)).batch
                if dice.random() < 0.5 and batch.size > 1:
                    kept = list(batch.request_ids)[1:]
                    batch = client.FilterBatch(batch_id=batch.id, request_ids=kept).batch
                if dice.random() < 0.2:
                    client.ClearCache(id=batch.id)
                    continue
                heard.run_out(client, batch)
                for i, said in heard.ids.items():
                    assert said == oracle.answer(ids[i])[: len(said)]
                    assert len(said) in (1, NEW)

    def watched(work: Any, *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:  # told by the test itself
            failures.append(error)

    for one in ids:
        oracle.answer(one)  # so that threads need not
    with served(worker, checkpoint, depth, **changes) as target:
        threads = [
            threading.Thread(target=watched, args=(lambda: asyncio.run(session(target)),)),
            threading.Thread(target=watched, args=(drive, target, V3, 1)),
            threading.Thread(target=watched, args=(drive, target, V2, 2)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=150)
        for service in (V2, V3):
            with ReflectionClient(target, service) as client:
                client.ClearCache()
    assert not failures, failures[0]
