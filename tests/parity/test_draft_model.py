"""With a draft model, the whole engine gives what it gives without, in fewer steps if it is right.

In bfloat16, with the kernels whose logits do not depend on how many rows are computed at once: a
draft model that equals the target is always right.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity.cases import CASES
from tests.parity.test_drafts import LIMITS, PROMPTS, SAMPLED, VOCAB, requests, told
from tests.tools.checkpoints import make_llama
from tests.tools.lora_adapters import make_adapter
from tests.tools.miniatures import make_miniature
from tgi_cli import LLM, SamplingParams, demo
from tgi_cli.engine.speculation.step_costs import StepCosts
from tgi_cli.engine.step import StepTime
from tgi_cli.errors import ConfigError, UnsupportedModelError
from tgi_cli.kernels import cpp_library

FREE = (StepTime(1, 1, 8, 1.0), StepTime(1, 64, 8, 1.0))
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    return make_llama(path, vocab_size=VOCAB, tokenizer=demo.model_path())


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of other weights and sizes."""
    path = tmp_path_factory.mktemp("other")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "seed": 5}
    return make_llama(path, vocab_size=VOCAB, tokenizer=demo.model_path(), **sizes)


@pytest.fixture(autouse=True)
def _free_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and proposals cost nothing: as many are verified as may be right."""
    if cpp_library() is None:
        pytest.skip("torch's products differ by the number of rows, in their last bits")
    monkeypatch.setattr("tgi_cli.worker.worker.time_steps", lambda *_: FREE)
    monkeypatch.setattr(StepCosts, "learn", lambda *_: None)
    monkeypatch.setattr(StepCosts, "learn_proposing", lambda *_: None)


class Counted:
    """Counts steps, and the draft tokens that they verify."""

    def __init__(self) -> None:
        self.steps = self.drafts = 0

    def __call__(self, stats: str) -> None:
        self.steps += 1
        self.drafts += json.loads(stats)["Draft Tokens"]


def answers(llm: LLM) -> Iterator[Any]:
    yield from told(requests(llm))
    mixed = llm.generate(PROMPTS, [GREEDY, SAMPLED] * 4, max_new_tokens=40)
    yield from ([done.token_ids, done.finish_reason] for done in mixed)


ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "preempted": {"max_batch_total_tokens": 320},
    "8-bit weights": {"quantize": "int8"},
    "without prefixes": {"prefix_caching": False},
}


@pytest.mark.parametrize("name", ENGINES)
def test_answers_are_the_same_with_a_draft_model(target: Path, other: Path, name: str) -> None:
    limits = LIMITS | ENGINES[name]
    with LLM(target, speculate=0, **limits) as llm:
        expected = list(answers(llm))
    for model in (target, other):
        counted = Counted()
        with LLM(target, speculative_model=str(model), on_stats=counted, **limits) as llm:
            assert list(answers(llm)) == expected
        assert counted.drafts > 100


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_model_that_is_the_target_is_always_right(
    target: Path, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tgi_cli.engine.speculation.LookupDrafter", lambda _: Nothing())
    counted = Counted()
    with LLM(target, speculative_model=str(target), on_stats=counted, **LIMITS) as llm:
        (warm,) = llm.generate(PROMPTS[:1], sampling, max_new_tokens=100, ignore_eos=True)
        before = counted.steps
        (done,) = llm.generate(PROMPTS[1:2], sampling, max_new_tokens=65, ignore_eos=True)
    assert len(warm.token_ids) == 100
    assert len(done.token_ids) == 65
    # The prompt's step gives a token, and each further one seven drafts and one more.
    chunks = -(-len(done.prompt_ids) // LIMITS["max_batch_prefill_tokens"])
    assert counted.steps - before <= chunks + 64 // 8 + 2


def test_a_draft_model_of_other_weights_is_rarely_right_and_soon_left_alone(
    target: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tgi_cli.engine.speculation.LookupDrafter", lambda _: Nothing())
    monkeypatch.setattr(
        "tgi_cli.worker.worker.time_steps",
        lambda *_: (
            StepTime(1, 1, 8, 1.0),
            StepTime(1, 9, 8, 1.8),
            StepTime(1, 1, 8, 1.3, 1),
            StepTime(1, 1, 8, 3.1, 7),
        ),
    )
    counted = Counted()
    with LLM(target, speculative_model=str(other), on_stats=counted, **LIMITS) as llm:
        llm.generate(PROMPTS[:1], GREEDY, max_new_tokens=100, ignore_eos=True)
        early = counted.drafts
        llm.generate(PROMPTS[1:2], GREEDY, max_new_tokens=100, ignore_eos=True)
    assert 0 < early < 60
    assert counted.drafts - early < 20


class Nothing:
    """Finds no drafts."""

    def draft(self, sequence: object, most: int) -> None:
        return None

    def finish(self, sequence: object) -> None:
        pass


def test_adapters_are_the_targets_alone(target: Path, tmp_path: Path) -> None:
    adapter = make_adapter(target, tmp_path / "first", seed=1)
    told_of = []
    for model in (None, str(target)):
        limits = LIMITS | {"speculate": 7 if model else 0}
        with LLM(
            target, lora_adapters={"first": adapter}, speculative_model=model, **limits
        ) as llm:
            done = llm.generate(
                PROMPTS[:3], SAMPLED, max_new_tokens=40, adapter=["first", None, "first"]
            )
            told_of.append([(each.token_ids, each.logprobs) for each in done])
    assert told_of[0] == told_of[1]


def renumbered(target: Path, path: Path, missing: int = 0) -> Path:
    """The target with its tokens in another order, the last ``missing`` words being others."""
    shutil.copytree(target, path)
    tokenizer = path / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    added = {each["id"] for each in content["added_tokens"]}
    ids = [number for number in range(VOCAB) if number not in added]
    moved = ids[7:] + ids[:7]
    new = dict(zip(ids, moved, strict=True)) | {number: number for number in added}
    vocabulary = {token: new[number] for token, number in content["model"]["vocab"].items()}
    words = [token for token in vocabulary if len(token) > 2][-missing:] if missing else []
    content["model"]["vocab"] = {
        f"\u00b6{token}\u00b6" if token in words else token: number
        for token, number in vocabulary.items()
    }
    content["model"]["merges"] = []
    tokenizer.write_text(json.dumps(content))
    file = path / "model.safetensors"
    tensors = load_file(file)
    order = torch.tensor([old for old, _ in sorted(new.items(), key=lambda each: each[1])])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = tensors[name][order].contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_target_with_other_numbers_for_its_tokens_is_always_right(
    target: Path, tmp_path: Path, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tgi_cli.engine.speculation.LookupDrafter", lambda _: Nothing())
    counted = Counted()
    draft = str(renumbered(target, tmp_path / "draft"))
    with LLM(target, speculative_model=draft, on_stats=counted, **LIMITS) as llm:
        (warm,) = llm.generate(PROMPTS[:1], sampling, max_new_tokens=100, ignore_eos=True)
        before = counted.steps
        (done,) = llm.generate(PROMPTS[1:2], sampling, max_new_tokens=65, ignore_eos=True)
    assert len(warm.token_ids) == 100
    chunks = -(-len(done.prompt_ids) // LIMITS["max_batch_prefill_tokens"])
    assert counted.steps - before <= chunks + 64 // 8 + 2


def test_answers_are_the_same_with_a_draft_model_that_lacks_tokens(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draft = str(renumbered(target, tmp_path / "draft", missing=VOCAB // 2))
    with LLM(target, speculate=0, **LIMITS) as llm:
        expected = list(answers(llm))
    counted = Counted()
    with (
        caplog.at_level("INFO"),
        LLM(target, speculative_model=draft, on_stats=counted, **LIMITS) as llm,
    ):
        assert list(answers(llm)) == expected
    assert counted.drafts > 100
    found = re.search(r"has another vocabulary, and can draft (\d+) of 4096 tokens", caplog.text)
    assert found is not None
    assert VOCAB // 3 < int(found[1]) <= VOCAB // 2


def test_a_draft_model_with_recurrent_states_is_refused_by_name(
    target: Path, tmp_path: Path
) -> None:
    draft = make_miniature(CASES["LFM 2"], tmp_path / "draft")
    for file in target.glob("tokenizer*"):
        shutil.copy(file, draft)
    with pytest.raises(UnsupportedModelError, match=r"recurrent states of .* cannot be rolled"):
        LLM(target, speculative_model=str(draft), **LIMITS)


def test_a_target_with_recurrent_states_refuses_drafts_by_name(tmp_path: Path) -> None:
    path = make_miniature(CASES["LFM 2"], tmp_path)
    with pytest.raises(ConfigError, match=r"recurrent states of .* cannot be rolled back"):
        LLM(path, speculative_model=str(path), **LIMITS)


def test_without_drafts_no_draft_model_is_loaded(target: Path) -> None:
    with LLM(target, speculative_model="/nowhere", speculate=0, **LIMITS) as llm:
        assert llm.info.speculate == 0
