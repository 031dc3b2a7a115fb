"""Models with recurrent states in the whole engine: what is reused changes no token.

Each request is first computed alone, by an engine that reuses nothing; what it answers and how
likely each token was must come out again from prefixes, forks, chunks and preempted sequences.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.cases import CASES
from tests.parity.families import make_checkpoint, random_ids
from tests.unit.engine.test_core import Client, running
from tgi_cli.config import BLOCK_SIZE, ServeConfig
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.messages import Cancel, GenerationRequest, StepOutputs
from tgi_cli.errors import ConfigError
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.factory import load_worker
from tgi_cli.worker.worker import ModelWorker

MOST = 192
ROWS = 6
SPARE = 5
SAID: dict[str, Any] = {
    "max_total_tokens": MOST,
    "max_batch_prefill_tokens": 64,
    "max_batch_total_tokens": 2048,
    "max_batch_size": ROWS,
}
ALONE = replace(
    CASES["Granite 4"], values=CASES["Granite 4"].values | {"layer_types": ["mamba"] * 4}
)
"""A model without keys and values: its blocks only count tokens."""
MODELS = {name: CASES[name] for name in ("LFM 2", "LFM 3", "Granite 4", "Qwen 3.5")} | {
    "states alone": ALONE
}


class Listener(Client):
    """Records how likely each token was, too."""

    def __init__(self, core: Any) -> None:
        super().__init__(core)
        self.logprobs: dict[int, list[float]] = {}

    def read(self) -> StepOutputs | None:
        outputs = super().read()
        if outputs is not None:
            for request_id, value in zip(outputs.request_ids, outputs.logprobs, strict=True):
                self.logprobs.setdefault(request_id, []).append(value)
        return outputs


@pytest.fixture(scope="module", params=MODELS)
def worker(request: Any, tmp_path_factory: Any) -> Iterator[ModelWorker]:
    path = make_checkpoint(MODELS[request.param], tmp_path_factory.mktemp("states"))
    serve = ServeConfig(model_id="miniature", dtype="float32", **SAID)
    worker, _ = load_worker(serve, path)
    assert isinstance(worker, ModelWorker)
    capacity = worker.warmup()
    assert capacity.num_state_slots >= ROWS + SPARE
    assert worker.attention.states is not None
    for tensors in worker.attention.states.tensors:
        for tensor in tensors.values():
            tensor.fill_(float("nan"))  # no state may be read that was not written
    yield worker
    worker.close()


@contextmanager
def engine(
    worker: Any, requests: Iterable[GenerationRequest] = (), **changes: Any
) -> Iterator[Listener]:
    """A client of an engine whose loop finds ``requests`` in its inbox when it starts."""
    values: dict[str, Any] = {
        "max_total_tokens": MOST,
        "max_batch_prefill_tokens": 64,
        "max_batch_size": ROWS,
        "block_size": BLOCK_SIZE,
        "num_blocks": 120,
        "num_state_slots": ROWS + SPARE,
        "window": worker.model.kv_window if "window" not in changes else None,
    }
    with running(worker, SchedulerConfig(**(values | changes)), requests=requests) as client:
        yield Listener(client.core)


def ask(request_id: int, prompt: list[int], new: int, **more: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(temperature=0.0),
        max_new_tokens=new,
        ignore_eos=True,
        **more,
    )


Answers = list[tuple[list[int], list[float]]]


def alone(worker: ModelWorker, prompts: list[list[int]], new: int) -> Answers:
    """The answers to prompts one by one, each from its beginning."""
    bounds: dict[str, Any] = {
        "prefix_caching": False,
        "max_batch_prefill_tokens": MOST,
        "num_state_slots": ROWS,
    }
    with engine(worker, **bounds) as client:
        return [run(client, ask(i, prompt, new))[0] for i, prompt in enumerate(prompts)]


def run(client: Listener, *requests: GenerationRequest) -> Answers:
    for request in requests:
        client.core.inbox.put(request)
    return answers_to(client, requests)


def answers_to(client: Listener, requests: Sequence[GenerationRequest]) -> Answers:
    client.read_until_finished(*(request.request_id for request in requests))
    return [(client.tokens[r.request_id], client.logprobs[r.request_id]) for r in requests]


def test_prompts_with_common_beginnings_and_second_turns(worker: ModelWorker) -> None:
    shared = random_ids(140, seed=1)
    prompts = [shared[:n] + random_ids(tail, n) for n, tail in ((0, 5), (20, 9), (140, 3))]
    prompts += [shared[:n] for n in (16, 17, 32, 33)] + [shared + random_ids(20, 8)]
    expected = alone(worker, prompts, 20)
    turns = [
        [*prompt, *tokens, *random_ids(6, 7)]
        for prompt, (tokens, _) in zip(prompts, expected, strict=True)
    ]
    turns_expected = alone(worker, turns, 5)
    for budget in (7, 64):
        with engine(worker, max_batch_prefill_tokens=budget) as client:
            for start in (0, 100):
                asked = [ask(start + i, prompt, 20) for i, prompt in enumerate(prompts)]
                assert run(client, *asked) == expected
            asked = [ask(300 + i, turn, 5) for i, turn in enumerate(turns)]
            assert run(client, *asked) == turns_expected
            load = client.core.metrics.load
        assert load.reused_tokens > 300
        assert load.used_state_slots == 0


def test_samples_of_one_prompt(worker: ModelWorker) -> None:
    prompts = [random_ids(n, seed=n) for n in (5, 16, 17, 100)]
    expected = alone(worker, prompts, 20)
    with engine(worker, prefix_caching=False) as client:
        asked = []
        for i, prompt in enumerate(prompts):
            asked += [ask(10 * i, prompt, 20), ask(10 * i + 1, prompt, 20, fork_of=10 * i)]
            asked += [ask(10 * i + 2, prompt, 20, fork_of=10 * i)]
        answers = run(client, *asked)
    assert answers == [each for each in expected for _ in range(3)]


def test_preemption_and_cancellation(worker: ModelWorker) -> None:
    """Too few blocks for all; some requests are cancelled wherever they are."""
    choose = random.Random(3)
    prompts = [random_ids(choose.randrange(1, 60), seed=i) for i in range(8)]
    expected = alone(worker, prompts, 30)
    asked = [ask(i, prompt, 30) for i, prompt in enumerate(prompts)]
    with engine(worker, asked, num_blocks=12, max_batch_prefill_tokens=24) as client:
        while not client.core.metrics.load.preemptions:
            client.read()
        for gone in choose.sample(range(8), 2):
            for _ in range(choose.randrange(8)):
                client.read()
            client.core.inbox.put(Cancel(gone))
        client.read_until_finished(*range(8))
        assert client.core.metrics.load.preemptions > 0
    for i, (tokens, logprobs) in enumerate(expected):
        count = len(client.tokens.get(i, []))
        assert client.tokens.get(i, []) == tokens[:count]
        assert client.logprobs.get(i, []) == logprobs[:count]
    likely = [value for values in client.logprobs.values() for value in values]
    assert torch.isfinite(torch.tensor(likely)).all()


@pytest.mark.slow
def test_two_shards_keep_their_states_in_the_same_slots(tmp_path: Path) -> None:
    path = make_checkpoint(CASES["Granite 4"], tmp_path)
    prompts = [random_ids(n, seed=1) for n in (60, 33, 60, 90)]
    answers = []
    for num_shard in (1, 2):
        serve = ServeConfig(model_id="m", dtype="float32", num_shard=num_shard, **SAID)
        worker, _ = load_worker(serve, path)
        slots = worker.warmup().num_state_slots
        bounds = {"num_blocks": 14, "num_state_slots": slots, "window": None}
        try:
            first, again = (
                [ask(start + i, prompt, 20) for i, prompt in enumerate(prompts)]
                for start in (0, 10)
            )
            with engine(worker, first, **bounds) as client:
                answers.append([tokens for tokens, _ in answers_to(client, first)])
                answers.append([tokens for tokens, _ in run(client, *again)])
                assert client.core.metrics.load.reused_tokens > 60
                assert client.core.metrics.load.preemptions
        finally:
            worker.close()
    assert all(each == answers[0] for each in answers)


def test_nothing_is_speculated_where_a_state_cannot_be_rolled_back(tmp_path: Path) -> None:
    path = make_checkpoint(ALONE, tmp_path)
    serve = ServeConfig(model_id="miniature", dtype="float32", **SAID)
    worker, config = load_worker(serve, path)
    capacity = worker.warmup()
    worker.close()
    assert config.speculate == 7
    assert (capacity.config.speculate, capacity.step_times) == (0, ())
    with pytest.raises(ConfigError, match="--speculate 3: the recurrent states"):
        load_worker(replace(serve, speculate=3), path)
    with pytest.raises(ConfigError, match="--kv-cache-dir: the model keeps recurrent states"):
        load_worker(replace(serve, kv_cache_dir=tmp_path / "kv"), path)
