"""With draft tokens, the whole engine gives what it gives without: tokens, bits, finish reasons.

A first engine answers without drafts, and what it answers is recorded. A second one gets the same
requests, and drafts that are right, wrong, or right up to a point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.checkpoints import make_llama
from tests.tools.lora_adapters import make_adapter
from tests.unit.engine.fake_speculator import FakeSpeculator
from tgi_cli import LLM, SamplingParams, demo
from tgi_cli.engine.sequence import Sequence as Running
from tgi_cli.engine.speculation.step_costs import StepCosts
from tgi_cli.engine.step import Proposal, Step, StepTime
from tgi_cli.kernels import cpp_library
from tgi_cli.kernels.linear import multiplies_bytes
from tgi_cli.llm import Completion, load

VOCAB = 4096
LIMITS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_total_tokens": 160,
    "max_batch_prefill_tokens": 48,
    "max_batch_total_tokens": 4096,
    "max_batch_size": 12,
}
PROMPTS = [
    "Say what this function returns, and say it twice, in other words: " + text
    for text in ("open(path)", "sum(xs)", "len(x) + 1", "None", "a", "b", "c", "d")
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
        "kind": {"enum": ["first", "second", "third of them"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}


class Recorder:
    """A speculator that drafts nothing, and remembers the answers."""

    asks_worker = False

    def __init__(self) -> None:
        self.answers: dict[int, list[int]] = {}

    def may_propose(self, sequences: Sequence[Running], others: int = 0) -> bool:
        return True

    def propose(
        self, sequences: Sequence[Running], waiting: bool, others: int = 0
    ) -> list[list[int]]:
        return [[] for _ in sequences]

    def ask(self, sequences: Sequence[Running]) -> None:
        raise AssertionError("the worker has no drafter")

    def proposed(self, sequence: Running, proposal: Proposal) -> None:
        raise AssertionError("the worker has no drafter")

    def learn(self, sequence: Running, drafts: Sequence[int], accepted: int) -> None:
        raise AssertionError("nothing was drafted")

    def finish(self, sequence: Running) -> None:
        answer = sequence.token_ids[sequence.prompt_tokens :]
        self.answers[sequence.request.request_id] = answer

    def timed(self, step: Step, seconds: float) -> None:
        assert not step.drafts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    return make_llama(path, vocab_size=VOCAB, tokenizer=demo.model_path())


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(checkpoint, tmp_path_factory.mktemp("adapter") / "first", seed=1)


@pytest.fixture(autouse=True)
def _kernels(request: pytest.FixtureRequest) -> None:
    if cpp_library() is None:
        pytest.skip("torch's products differ by the number of rows, in their last bits")


SAMPLED = SamplingParams(temperature=1.1, top_p=0.95, top_k=50, seed=5, top_logprobs=3)
SAMPLINGS = [
    SamplingParams(temperature=0.0, top_logprobs=2),
    SAMPLED,
    replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3),
    replace(SAMPLED, watermark=True, relative_frequency_penalty=0.2),
    replace(SAMPLED, typical_p=0.8, min_p=0.01, logit_bias=((7, 3.0), (9, -50.0))),
    replace(SAMPLED, bad_words=((5,), (6, 7)), min_new_tokens=20),
    replace(SAMPLED, allowed_token_ids=tuple(range(20, 60))),
    SamplingParams(temperature=0.0, repetition_penalty=1.2),
]
"""For each of the prompts."""


FEW = (SAMPLINGS[0], SAMPLINGS[2], SAMPLINGS[5])
"""For engines that sample as others do: greedy, with penalties, with words that are excluded."""


def requests(
    llm: LLM, adapters: bool = False, samplings: Sequence[SamplingParams] = SAMPLINGS
) -> Iterator[list[Completion]]:
    """The answers to requests of many kinds, a batch of each."""
    for sampling in samplings:
        yield llm.generate(PROMPTS[:3], sampling, max_new_tokens=40, ignore_eos=True)
    stops = range(0, VOCAB, 40)
    yield llm.generate(PROMPTS[:3], SAMPLED, max_new_tokens=40, n=3, stop_token_ids=stops)
    yield llm.generate(PROMPTS[:2], max_new_tokens=30, stop=["e", " a"], prompt_logprobs=2)
    grammar = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    yield llm.generate(PROMPTS[:3], SAMPLED, max_new_tokens=60, grammar=grammar)
    bad = replace(SAMPLED, bad_words=((5,),))  # forced tokens are sampled, too
    yield llm.generate(PROMPTS[:2], bad, max_new_tokens=60, grammar=grammar)
    if adapters:
        for names in ("first", ["first", None, "first"]):
            yield llm.generate(PROMPTS[:3], SAMPLED, max_new_tokens=40, adapter=names)


def told(batches: Iterator[list[Completion]]) -> list[list[Any]]:
    return [
        [done.token_ids, done.logprobs, done.top_logprobs, done.finish_reason, done.text]
        for batch in batches
        for done in batch
    ]


def compare(make: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """Check that the answers are the same, and that drafts were accepted and rejected."""
    recorder = Recorder()
    monkeypatch.setattr(load, "create_speculator", lambda *_: recorder)
    with make() as llm:
        expected = told(requests(llm, **more))
        # Whose requests share a step depends on drafts, and the sampler has several paths, which
        # add up in another order.
        mixed = llm.generate(PROMPTS, SAMPLINGS, max_new_tokens=40)
    made = FakeSpeculator("partly", recorder.answers.__getitem__, vocab_size=VOCAB)
    monkeypatch.setattr(load, "create_speculator", lambda *_: made)
    with make() as llm:
        assert told(requests(llm, **more)) == expected
        for one, two in zip(
            mixed, llm.generate(PROMPTS, SAMPLINGS, max_new_tokens=40), strict=True
        ):
            assert (one.token_ids, one.finish_reason) == (two.token_ids, two.finish_reason)
            assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)
    assert made.drafted > made.accepted > 200


ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "preempted": {"max_batch_total_tokens": 320},
    "8-bit weights": {"quantize": "int8", "quantize_activations": False},
    "4-bit weights": {"quantize": "bitsandbytes-nf4"},
    "8-bit head": {"quantize_head": True, "quantize_activations": False},
    "8-bit cache": {"kv_cache_dtype": "fp8_e4m3fn"},
    "chunks alone": {"batching": "inflight", "max_batch_prefill_tokens": 160},
    "without prefixes": {"prefix_caching": False},
}
if multiplies_bytes():
    ENGINES["8-bit weights and activations"] = {"quantize": "int8", "quantize_activations": True}
    ENGINES["8-bit head, its activations too"] = {"quantize_head": True}


@pytest.mark.tgi_pain(4)
@pytest.mark.parametrize("name", ENGINES)
def test_answers_are_the_same_with_drafts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    samplings = SAMPLINGS if name == "plain" else FEW
    compare(lambda: LLM(checkpoint, **(LIMITS | ENGINES[name])), monkeypatch, samplings=samplings)


def test_answers_of_a_sliding_window_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    window: dict[str, Any] = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 24,
    }
    path = make_llama(tmp_path, vocab_size=VOCAB, tokenizer=demo.model_path(), **window)
    compare(lambda: LLM(path, **LIMITS), monkeypatch, samplings=FEW)


def test_answers_of_adapters_are_the_same(
    checkpoint: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(
        lambda: LLM(checkpoint, lora_adapters={"first": adapter}, **LIMITS),
        monkeypatch,
        adapters=True,
        samplings=FEW,
    )


@pytest.mark.slow
def test_answers_of_two_shards_are_the_same(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With penalties alone: the first shard samples, as one that is alone does."""
    compare(lambda: LLM(checkpoint, num_shard=2, **LIMITS), monkeypatch, samplings=FEW[1:2])


def test_looked_up_drafts_change_nothing_but_the_number_of_steps(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the speculator that serves, on a model that is made to repeat itself."""
    free = (StepTime(1, 1, 8, 1.0), StepTime(1, 64, 8, 1.0))
    monkeypatch.setattr("tgi_cli.worker.worker.time_steps", lambda *_: free)
    monkeypatch.setattr(StepCosts, "learn", lambda *_: None)
    repeating = SamplingParams(temperature=0.0, frequency_penalty=-0.5)
    steps, answers = [], []
    for speculate in (0, 7):
        counted: list[str] = []
        with LLM(checkpoint, on_stats=counted.append, speculate=speculate, **LIMITS) as llm:
            done = llm.generate(PROMPTS[:3], repeating, max_new_tokens=60, ignore_eos=True)
            done += llm.generate(PROMPTS[:3], SAMPLED, max_new_tokens=40, ignore_eos=True)
            again = llm.generate(PROMPTS[:3], SAMPLED, max_new_tokens=40, ignore_eos=True)
        answers.append([(each.token_ids, each.logprobs) for each in done + again])
        steps.append(len(counted))
    assert answers[0] == answers[1]
    assert steps[1] < 0.7 * steps[0], "what was answered before is drafted, too"


def test_torch_alone_gives_the_same_tokens(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, where sums differ by the number of rows in bits that decide nothing here."""
    torch.manual_seed(0)
    recorder = Recorder()
    limits = LIMITS | {"dtype": "float32"}
    monkeypatch.setattr(load, "create_speculator", lambda *_: recorder)
    with LLM(checkpoint, **limits) as llm:
        expected = llm.generate(PROMPTS, SAMPLINGS, max_new_tokens=40, ignore_eos=True)
    made = FakeSpeculator("partly", recorder.answers.__getitem__, vocab_size=VOCAB)
    monkeypatch.setattr(load, "create_speculator", lambda *_: made)
    with LLM(checkpoint, **limits) as llm:
        got = llm.generate(PROMPTS, SAMPLINGS, max_new_tokens=40, ignore_eos=True)
    for one, two in zip(expected, got, strict=True):
        assert one.token_ids == two.token_ids
        assert one.logprobs == pytest.approx(two.logprobs, abs=1e-4)
    assert made.accepted > 50
