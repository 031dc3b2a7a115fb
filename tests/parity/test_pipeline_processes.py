"""A whole engine in two stages of two shards, in four processes, does what it does in one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.test_sharded_engine import PROMPTS, shard_processes
from tests.tools.checkpoints import make_llama
from tests.tools.near_ties import decided
from tgi_cli import LLM, SamplingParams, demo
from tgi_cli.llm import EngineDeadError, GenerationError

pytestmark = pytest.mark.slow


class Engine:
    """An LLM, and the last statistics of its steps."""

    def __init__(self, checkpoint: Path, stages: int = 1, num_shard: int = 1) -> None:
        self.stats: dict[str, Any] = {}
        before = shard_processes()
        self.llm = LLM(
            checkpoint,
            dtype="float32",
            num_shard=num_shard,
            pipeline_parallel_size=stages,
            max_total_tokens=128,
            max_batch_prefill_tokens=48,
            max_batch_total_tokens=320,  # less than the requests of a test want at once
            max_batch_size=6,
            on_stats=lambda text: self.stats.update(json.loads(text)),
        )
        self.processes = sorted(set(shard_processes()) - set(before))

    def ids(self, prompts: Sequence[str] = PROMPTS, **options: Any) -> list[list[int]]:
        sampling = options.pop("sampling", None)
        options = {"max_new_tokens": 50, "ignore_eos": True} | options
        return [done.token_ids for done in self.llm.generate(prompts, sampling, **options)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(
        tmp_path_factory.mktemp("llama"),
        vocab_size=4096,
        dtype=torch.float32,
        tokenizer=demo.model_path(),
    )


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Iterator[Engine]:
    engine = Engine(checkpoint)
    yield engine
    engine.llm.close()


@pytest.fixture(scope="module")
def staged(checkpoint: Path) -> Iterator[Engine]:
    engine = Engine(checkpoint, stages=2, num_shard=2)
    yield engine
    engine.llm.close()


def test_preempted_and_reused(alone: Engine, staged: Engine) -> None:
    assert len(staged.processes) == 3
    assert staged.ids() == alone.ids()
    assert staged.stats["Preemptions"] > 0
    before = staged.stats["Reused prompt tokens"]
    assert staged.ids(PROMPTS[:1], max_new_tokens=5) == alone.ids(PROMPTS[:1], max_new_tokens=5)
    assert staged.stats["Reused prompt tokens"] > before
    assert staged.stats["MicroBatch ID"] in (0, 1)


def test_seeds_penalties_and_samples_of_a_prompt(alone: Engine, staged: Engine) -> None:
    sampling = SamplingParams(temperature=0.5, top_p=0.9, repetition_penalty=1.2, seed=11)
    asked: dict[str, Any] = {"sampling": sampling, "n": 3, "max_new_tokens": 20}
    expected = decided(partial(alone.ids, PROMPTS[:2]), **asked)
    chosen = staged.ids(PROMPTS[:2], **asked)
    assert [ids[: len(own)] for ids, own in zip(chosen, expected, strict=True)] == expected
    assert sum(map(len, expected)) > 60, "too little of 120 tokens is compared"
    assert len(set(map(tuple, chosen))) > 1


def test_beams_stop_strings_and_grammars(alone: Engine, staged: Engine) -> None:
    def texts(engine: Engine) -> list[Any]:
        found: list[Any] = [beam.token_ids for beam in engine.llm.beam_search(PROMPTS[0], 3, 6)[0]]
        stop = alone.llm.generate(PROMPTS[:1], max_new_tokens=20)[0].text[5:8]
        found += [done.text for done in engine.llm.generate(PROMPTS[:2], stop=stop)]
        grammar = {"type": "regex", "value": "(ab|cd){3} [0-9]{4}"}
        found += [done.text for done in engine.llm.generate(PROMPTS[:4], grammar=grammar)]
        return found

    assert texts(staged) == texts(alone)


def test_prompt_logprobs_are_reported(alone: Engine, staged: Engine) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 4, "prompt_logprobs": 3}
    for one, two in zip(
        alone.llm.generate(PROMPTS[:3], **asked),
        staged.llm.generate(PROMPTS[:3], **asked),
        strict=True,
    ):
        assert one.token_ids == two.token_ids
        assert one.prompt_logprobs is not None
        assert two.prompt_logprobs is not None
        assert one.prompt_logprobs[1:] == pytest.approx(two.prompt_logprobs[1:], abs=1e-4)


def test_a_killed_stage_ends_every_call_with_its_name(staged: Engine) -> None:
    """The last test of these four processes."""
    stream = staged.llm.stream(PROMPTS[0], max_new_tokens=60, ignore_eos=True)
    next(iter(stream))
    os.kill(staged.processes[-1], signal.SIGKILL)
    cause = "shard 1 of stage 0 was killed by SIGKILL"
    with pytest.raises(GenerationError, match=cause):
        list(stream)
    with pytest.raises(EngineDeadError, match=cause):
        staged.ids()
    staged.llm.close()
    assert not set(shard_processes()) & set(staged.processes)


def test_a_stopped_stage_is_noticed(checkpoint: Path) -> None:
    engine = Engine(checkpoint, stages=2)
    assert engine.ids(PROMPTS[:2], max_new_tokens=3)
    (stage,) = engine.processes
    stream = engine.llm.stream(PROMPTS[0], max_new_tokens=60, ignore_eos=True)
    next(iter(stream))
    os.kill(stage, signal.SIGSTOP)
    with pytest.raises(GenerationError, match="stage 0 has not answered for 5 s"):
        list(stream)
    engine.llm.close()
    assert stage not in shard_processes()
