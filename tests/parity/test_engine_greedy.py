"""The whole engine against transformers: greedy tokens identical in fp32, however it schedules.

Each request's answer is computed by ``transformers.generate`` on its own. The engine gets them
alone, together, arriving and cancelled at random, under every batching rule, with a pool so
small that it preempts, with and without prefix reuse.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, MistralForCausalLM

from tests.tools.checkpoints import make_llama
from tests.unit.engine.test_core import Client
from tgi_cli.config import BLOCK_SIZE, ServeConfig
from tgi_cli.engine.config import Batching, CapacityPolicy, SchedulerConfig
from tgi_cli.engine.core import EngineCore
from tgi_cli.engine.messages import Cancel, FinishReason, GenerationRequest, Shutdown
from tgi_cli.engine.thinking import ThinkingBudget
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.factory import load_worker
from tgi_cli.worker.worker import ModelWorker

CHUNK = 24
NEW = 12

Oracle = Callable[[list[int], int], list[int]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_llama(path, seed=3, dtype=torch.float32, max_position_embeddings=256)
    return path


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    answers: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def answer(prompt: list[int], new: int) -> list[int]:
        key = (tuple(prompt), new)
        if key not in answers:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=new,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            answers[key] = out[0, len(prompt) :].tolist()
        return answers[key]

    return answer


@pytest.fixture(scope="module")
def worker(checkpoint: Path) -> ModelWorker:
    serve = ServeConfig(
        model_id="llama",
        dtype="float32",
        max_total_tokens=192,
        max_batch_prefill_tokens=CHUNK,
        max_batch_total_tokens=4096,
        max_batch_size=8,
    )
    worker, _ = load_worker(serve, checkpoint)
    worker.warmup()
    return worker


def test_a_sliding_window_model_frees_blocks_and_generates_the_same(tmp_path: Path) -> None:
    overrides: dict[str, Any] = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 40,
    }
    make_llama(tmp_path, seed=5, dtype=torch.float32, max_position_embeddings=256, **overrides)
    model = MistralForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    serve = ServeConfig(
        model_id="mistral", dtype="float32", max_batch_total_tokens=256, max_batch_size=4
    )
    loaded, _ = load_worker(serve, tmp_path)
    capacity = loaded.warmup()
    assert capacity.kv_window == 40
    prompts = {i: random_prompt(random.Random(i), 20 + 13 * i) for i in range(4)}
    with engine(
        loaded, window=capacity.kv_window, num_blocks=16, max_total_tokens=256, max_batch_size=4
    ) as client:
        for i, prompt in prompts.items():
            client.core.inbox.put(greedy(i, prompt, 100))
        client.read_until_finished(*prompts)
    for i, prompt in prompts.items():
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(ids, max_new_tokens=100, do_sample=False, eos_token_id=None)
        assert client.tokens[i] == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["fp8_e4m3fn", "fp8_e5m2"])
def test_an_8_bit_cache_holds_twice_the_tokens(checkpoint: Path, oracle: Oracle, name: str) -> None:
    blocks = {}
    for kv_cache_dtype in ("auto", name):
        serve = ServeConfig(
            model_id="llama",
            dtype="float32",
            kv_cache_dtype=kv_cache_dtype,
            max_batch_total_tokens=4096,
            max_batch_size=8,
        )
        loaded, config = load_worker(serve, checkpoint)
        capacity = loaded.warmup()
        blocks[kv_cache_dtype] = capacity.cache_bytes / capacity.num_blocks
    assert blocks[name] * 4 == blocks["auto"], "one byte in place of four"
    assert config.kv_cache_dtype in name.replace("fp8", "float8")
    prompt = random_prompt(random.Random(0), 60)
    with engine(loaded) as client:
        client.core.inbox.put(greedy(1, prompt, NEW))
        client.read_until_finished(1)
    exact = oracle(prompt, NEW)
    assert len(client.tokens[1]) == NEW
    agreeing = sum(a == b for a, b in zip(client.tokens[1], exact, strict=True))
    assert agreeing >= 1, "rounded keys and values do not change the first tokens"


@contextmanager
def engine(
    worker: ModelWorker,
    depth: int = 0,
    requests: Iterable[GenerationRequest] = (),
    **changes: Any,
) -> Iterator[Client]:
    """A client of an engine whose loop finds ``requests`` in its inbox when it starts."""
    assert worker.capacity is not None
    values: dict[str, Any] = {
        "max_total_tokens": 192,
        "max_batch_prefill_tokens": CHUNK,
        "max_batch_size": 8,
        "block_size": BLOCK_SIZE,
        "num_blocks": 256,
        "num_state_slots": worker.capacity.num_state_slots,
    }
    core = EngineCore(worker, SchedulerConfig(**(values | changes)), depth)
    for each in requests:
        core.inbox.put(each)
    thread = threading.Thread(target=core.run, daemon=True)
    thread.start()
    client = Client(core)
    try:
        yield client
    finally:
        core.inbox.put(Shutdown())
        while client.read() is not None:
            pass
        thread.join(timeout=60)


def greedy(request_id: int, prompt: list[int], new: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(temperature=0.0),
        max_new_tokens=new,
    )


def random_prompt(random_: random.Random, length: int) -> list[int]:
    return [random_.randrange(3, 250) for _ in range(length)]


EDGES = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]


@pytest.mark.parametrize("length", EDGES)
def test_a_lone_request_generates_what_transformers_does(
    worker: ModelWorker, oracle: Oracle, length: int
) -> None:
    prompt = random_prompt(random.Random(length), length)
    with engine(worker) as client:
        client.core.inbox.put(greedy(1, prompt, NEW))
        client.read_until_finished(1)
    assert client.tokens[1] == oracle(prompt, NEW)


def test_concurrent_requests_generate_what_transformers_does(
    worker: ModelWorker, oracle: Oracle
) -> None:
    prompts = {i: random_prompt(random.Random(length), length) for i, length in enumerate(EDGES)}
    with engine(worker) as client:
        for i, prompt in prompts.items():
            client.core.inbox.put(greedy(i, prompt, NEW))
        client.read_until_finished(*prompts)
    for i, prompt in prompts.items():
        assert client.tokens[i] == oracle(prompt, NEW)


SWITCHES: list[dict[str, Any]] = [
    {},
    {"prefix_caching": False},
    {"max_batch_prefill_tokens": 1, "max_batch_size": 3},
    {"max_batch_prefill_tokens": 7},
    {"max_batch_prefill_tokens": 192},
    {"max_batch_prefill_tokens": 192, "max_prefill_delay": 1, "token_seconds": 0.001},
    {"num_blocks": 14},
    {"num_blocks": 14, "prefix_caching": False},
    {"num_blocks": 14, "capacity_policy": CapacityPolicy.GUARANTEED_NO_EVICT},
    {"batching": Batching.INFLIGHT, "max_batch_prefill_tokens": 192},
    {"batching": Batching.STATIC},
    {"depth": 1},
    {"depth": 1, "num_blocks": 14},
]


TOGETHER = 8
"""Requests that wait when the engine starts: more than 14 blocks hold, before any is cancelled."""


@pytest.mark.tgi_pain(4)
@pytest.mark.parametrize("switches", SWITCHES, ids=lambda s: ",".join(map(str, s.values())) or "-")
def test_random_arrivals_and_cancellations(
    worker: ModelWorker, oracle: Oracle, switches: dict[str, Any]
) -> None:
    random_ = random.Random(11)
    shared = random_prompt(random_, 60)
    requests: dict[int, tuple[list[int], int]] = {}
    for i in range(24):
        prompt = shared[: random_.choice([0, 5, 16, 33, 60])]
        prompt = prompt + random_prompt(random.Random(i % 6), random_.choice([1, 15, 16, 40]))
        requests[i] = prompt, random_.choice([1, 4, NEW, 70])
    small = switches.get("num_blocks") == 14
    preempts = small and "capacity_policy" not in switches
    asked = [greedy(i, *request) for i, request in requests.items()]
    with engine(worker, requests=asked[:TOGETHER], **switches) as client:
        while preempts and not client.core.metrics.load.preemptions:
            client.read()
        for i in range(TOGETHER, 24):
            client.core.inbox.put(asked[i])
            if random_.random() < 0.2:
                client.core.inbox.put(Cancel(random_.randrange(i + 1)))
            for _ in range(random_.choice([0, 0, 1, 3])):
                if client.core.live_requests:
                    client.read()
        client.read_until_finished(*requests)
        preemptions = client.core.metrics.load.preemptions
    assert (preemptions > 0) == preempts
    for i, (prompt, new) in requests.items():
        told = client.tokens.get(i, [])
        if client.finished[i][0] is FinishReason.CANCELLED:
            assert told == oracle(prompt, new)[: len(told)]
        else:
            assert told == oracle(prompt, new)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("blocks", [256, 14])
def test_behind_a_spent_budget_the_answer_is_that_to_the_closed_reasoning(
    worker: ModelWorker, oracle: Oracle, depth: int, blocks: int
) -> None:
    """In batches with requests without one, and at 14 blocks with preemption."""
    close = (251, 252)
    prompts = [random_prompt(random.Random(i), length) for i, length in enumerate([1, 16, 40, 60])]
    requests = []
    for i in range(12):
        thinking = ThinkingBudget(tokens=i, open=(250,), close=close, inside=True)
        asked = replace(greedy(i, prompts[i % 4], 40), thinking=thinking if i % 3 else None)
        requests.append(asked)
    with engine(worker, depth, requests, num_blocks=blocks) as client:
        client.read_until_finished(*range(12))
        preemptions = client.core.metrics.load.preemptions
    assert (preemptions > 0) == (blocks == 14)
    for i in range(12):
        prompt = prompts[i % 4]
        if i % 3:
            thought = oracle(prompt, i)
            answer = oracle([*prompt, *thought, *close], 38 - i)
            assert client.tokens[i] == [*thought, *close, *answer]
        else:
            assert client.tokens[i] == oracle(prompt, 40)
