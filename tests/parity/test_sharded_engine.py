"""A whole engine on two shards, in two processes, does what it does on one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tools.checkpoints import make_llama
from tests.tools.lora_adapters import make_adapter
from tests.tools.near_ties import decided
from tgi_cli import LLM, SamplingParams, demo
from tgi_cli.llm import EngineDeadError, GenerationError
from tgi_cli.rpc.interface import AdapterError
from tgi_cli.worker.tensor_parallel import group

pytestmark = pytest.mark.slow

PREFIX = "Say what this function returns, and say it twice, in other words: "
PROMPTS = [PREFIX + text for text in ("open(path)", "sum(xs)", "len(x) + 1", "None", "a", "b")]


class Engine:
    """An LLM and the last statistics of its steps."""

    def __init__(self, checkpoint: Path, adapter: Path, num_shard: int) -> None:
        self.stats: dict[str, Any] = {}
        self.llm = LLM(
            checkpoint,
            dtype="float32",
            num_shard=num_shard,
            max_total_tokens=128,
            max_batch_prefill_tokens=48,
            max_batch_total_tokens=320,  # less than the requests of a test want at once
            max_batch_size=6,
            lora_adapters={"first": adapter},
            max_loras=2,
            max_lora_rank=8,
            on_stats=lambda text: self.stats.update(json.loads(text)),
        )

    def ids(self, prompts: Sequence[str] = PROMPTS, **options: Any) -> list[list[int]]:
        sampling = options.pop("sampling", None)
        options = {"max_new_tokens": 50, "ignore_eos": True} | options
        return [done.token_ids for done in self.llm.generate(prompts, sampling, **options)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    return make_llama(path, vocab_size=4096, dtype=torch.float32, tokenizer=demo.model_path())


@pytest.fixture(scope="module")
def make(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Engine]:
    adapter = make_adapter(checkpoint, tmp_path_factory.mktemp("adapter") / "first", seed=1)
    return lambda num_shard: Engine(checkpoint, adapter, num_shard)


@pytest.fixture(scope="module")
def alone(make: Callable[[int], Engine]) -> Iterator[Engine]:
    engine = make(1)
    yield engine
    engine.llm.close()


@pytest.fixture(scope="module")
def sharded(make: Callable[[int], Engine]) -> Iterator[Engine]:
    engine = make(2)
    yield engine
    engine.llm.close()


def shard_processes() -> list[int]:
    """Child processes that are shards."""
    lists = Path("/proc/self/task").glob("*/children")
    pids = [int(child) for listed in lists for child in listed.read_text().split()]
    return [pid for pid in pids if "tensor_parallel" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_preempted_and_resumed(alone: Engine, sharded: Engine) -> None:
    assert sharded.ids() == alone.ids()
    assert sharded.stats["Preemptions"] > 0


def test_cached_prefixes(alone: Engine, sharded: Engine) -> None:
    first = sharded.ids(PROMPTS[:1], max_new_tokens=5)
    before = sharded.stats["Reused prompt tokens"]
    assert sharded.ids(PROMPTS[:1], max_new_tokens=5) == first
    assert first == alone.ids(PROMPTS[:1], max_new_tokens=5)
    assert sharded.stats["Reused prompt tokens"] > before


def test_samples_that_share_a_prompt(alone: Engine, sharded: Engine) -> None:
    sampling = SamplingParams(temperature=0.5, top_p=0.9, repetition_penalty=1.2, seed=11)
    asked: dict[str, Any] = {"sampling": sampling, "n": 3, "max_new_tokens": 20}
    expected = decided(partial(alone.ids, PROMPTS[:2]), **asked)
    chosen = sharded.ids(PROMPTS[:2], **asked)
    assert [ids[: len(own)] for ids, own in zip(chosen, expected, strict=True)] == expected
    assert sum(map(len, expected)) > 60, "too little of 120 tokens is compared"
    assert len(set(map(tuple, chosen))) > 1


def test_beams(alone: Engine, sharded: Engine) -> None:
    found = [
        [beam.token_ids for beam in engine.llm.beam_search(PROMPTS[0], 3, 10)[0]]
        for engine in (alone, sharded)
    ]
    assert found[0] == found[1]


def test_prompt_logprobs_and_logits_are_reported(alone: Engine, sharded: Engine) -> None:
    asked: dict[str, Any] = {
        "max_new_tokens": 4,
        "prompt_logprobs": 3,
        "return_context_logits": True,
        "return_generation_logits": True,
    }
    for one, two in zip(
        alone.llm.generate(PROMPTS[:3], **asked),
        sharded.llm.generate(PROMPTS[:3], **asked),
        strict=True,
    ):
        assert one.token_ids == two.token_ids
        for name in ("context_logits", "generation_logits"):
            np.testing.assert_allclose(getattr(one, name), getattr(two, name), atol=1e-4)
        assert one.prompt_logprobs is not None
        assert two.prompt_logprobs is not None
        assert one.prompt_logprobs[1:] == pytest.approx(two.prompt_logprobs[1:], abs=1e-4)
        assert len(one.prompt_logprobs) > 10


def test_logits_processors_run_in_this_process(sharded: Engine) -> None:
    def only_seven(_id: int, logits: torch.Tensor, *_: object) -> torch.Tensor:
        logits[7] += 1000
        return logits

    (ids,) = sharded.ids(PROMPTS[:1], max_new_tokens=5, logits_processors=[only_seven])
    assert ids == [7] * 5


def test_adapters(alone: Engine, sharded: Engine, checkpoint: Path, tmp_path: Path) -> None:
    second = make_adapter(checkpoint, tmp_path / "second", seed=2)
    large = make_adapter(checkpoint, tmp_path / "large", rank=16)
    for engine in (alone, sharded):
        engine.llm.load_adapter("second", second)
        with pytest.raises(AdapterError, match="16"):
            engine.llm.load_adapter("large", large)
    mixed = ["first", None, "second", "first", "second", None]
    answers = [engine.ids(adapter=mixed, max_new_tokens=20) for engine in (alone, sharded)]
    assert answers[0] == answers[1]
    assert answers[0] != alone.ids(max_new_tokens=20)
    for engine in (alone, sharded):
        engine.llm.unload_adapter("second")
        assert engine.llm.adapters == ["first"]


def test_a_lost_shard_ends_every_call_with_its_name(make: Callable[[int], Engine]) -> None:
    before = shard_processes()
    engine = make(2)
    (shard,) = set(shard_processes()) - set(before)
    stream = engine.llm.stream(PROMPTS[0], max_new_tokens=60, ignore_eos=True)
    next(iter(stream))
    os.kill(shard, signal.SIGKILL)
    with pytest.raises(GenerationError, match="shard 1 was killed by SIGKILL"):
        list(stream)
    with pytest.raises(EngineDeadError, match="shard 1 was killed by SIGKILL"):
        engine.ids()
    engine.llm.close()
    assert set(shard_processes()) == set(before)


def test_a_shard_that_runs_and_does_not_compute_is_noticed(
    make: Callable[[int], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "OPERATION_SECONDS", {"cpu": 0.5})
    engine = make(2)
    monkeypatch.setattr(group.WorkerGroup, "send", lambda *_: None)
    with pytest.raises(GenerationError, match="did not take part in a step"):
        engine.ids()
    engine.llm.close()
