"""With every kind of drafter, greedy tokens are transformers' own, plain and assisted.

In float32 through torch, the whole engine against ``generate``. Drafts of random weights are wrong
nearly always; the target as its own draft model is always right.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.parity.cases import CASES
from tests.tools.checkpoints import make_llama
from tests.tools.draft_heads import add_mtp, make_eagle3, make_medusa, make_mlp_speculator
from tests.tools.miniatures import make_miniature, write_byte_tokenizer
from tests.tools.paged_run import random_ids
from tgi_cli import LLM, SamplingParams
from tgi_cli.engine.speculation.step_costs import StepCosts
from tgi_cli.engine.step import StepTime

FREE = (StepTime(1, 1, 8, 1.0), StepTime(1, 64, 8, 1.0))
GREEDY = SamplingParams(temperature=0.0)
LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "max_total_tokens": 128,
    "max_batch_prefill_tokens": 24,
    "max_batch_total_tokens": 1024,
    "max_batch_size": 4,
}
PROMPTS = [random_ids(length, length) for length in (5, 40, 16, 33)]
NEW = 40


class Drafts:
    """Counts draft tokens that steps verify."""

    def __init__(self) -> None:
        self.count = self.steps = 0

    def __call__(self, stats: str) -> None:
        self.steps += 1
        self.count += json.loads(stats)["Draft Tokens"]


@pytest.fixture(autouse=True)
def _free_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and proposals cost nothing: drafts are verified though few are right."""
    monkeypatch.setattr("tgi_cli.worker.worker.time_steps", lambda *_: FREE)
    monkeypatch.setattr(StepCosts, "learn", lambda *_: None)
    monkeypatch.setattr(StepCosts, "learn_proposing", lambda *_: None)


Asked = Callable[[Path, Path | None], list[list[int]]]


@pytest.fixture(scope="module")
def theirs() -> Asked:
    """transformers' answers to the prompts; with another model, by assisted generation."""

    def answers(path: Path, assistant: Path | None = None) -> list[list[int]]:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        more = {}
        if assistant is not None:
            kinds: Any = AutoModelForCausalLM
            more["assistant_model"] = kinds.from_pretrained(assistant, dtype=torch.float32).eval()
        found = []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=NEW,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                    **more,
                )
            found.append(out[0, len(prompt) :].tolist())
        return found

    return answers


def ours(path: Path, **settings: Any) -> tuple[list[list[int]], Drafts]:
    drafts = Drafts()
    with LLM(path, on_stats=drafts, **LIMITS, **settings) as llm:
        done = llm.generate(PROMPTS, GREEDY, max_new_tokens=NEW, ignore_eos=True)
    return [each.token_ids for each in done], drafts


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_llama(tmp_path_factory.mktemp("target"), num_hidden_layers=6)
    write_byte_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def expected(target: Path, theirs: Asked) -> list[list[int]]:
    return theirs(target, None)


HEADS: dict[str, Callable[[Path], Path]] = {
    "eagle3, SGLang's": lambda path: make_eagle3(path, "sglang", layer_ids=[0, 2, 4]),
    "eagle3, vLLM's": lambda path: make_eagle3(path, "vllm", own_embedding=True, qk_norm=True),
    "eagle3, speculators'": lambda path: make_eagle3(path, "speculators", draft_vocab=False),
    "medusa": lambda path: make_medusa(path, "tgi"),
    "medusa of two layers": lambda path: make_medusa(path, "tgi", layers=2),
    "medusa without heads": lambda path: make_medusa(path, "tgi2"),
    "medusa, vLLM's": lambda path: make_medusa(path, "vllm"),
    "mlp": lambda path: make_mlp_speculator(path, scale_input=True),
    "mlp, tied": lambda path: make_mlp_speculator(path, tied=True),
}


@pytest.mark.parametrize("name", HEADS)
def test_greedy_tokens_with_heads(
    target: Path, expected: list[list[int]], tmp_path: Path, name: str
) -> None:
    found, drafts = ours(target, speculative_model=str(HEADS[name](tmp_path)))
    assert found == expected
    assert drafts.count > 20


@pytest.mark.parametrize("layers", [1, 6])
def test_greedy_tokens_with_a_draft_model_are_those_of_assisted_generation(
    target: Path, expected: list[list[int]], theirs: Asked, tmp_path: Path, layers: int
) -> None:
    """Of one layer and other weights, and the target itself."""
    assistant = target
    if layers == 1:
        assistant = make_llama(tmp_path, num_hidden_layers=1, seed=4)
        write_byte_tokenizer(assistant)
    assert theirs(target, assistant) == expected
    found, drafts = ours(target, speculative_model=str(assistant))
    assert found == expected
    assert drafts.count > 20


def test_greedy_tokens_with_mtp_layers(theirs: Asked, tmp_path: Path) -> None:
    path = make_miniature(CASES["DeepSeek V3"], tmp_path)
    expected = theirs(path, None)
    add_mtp(path)
    found, drafts = ours(path, speculative_config={"method": "mtp"})
    assert found == expected
    assert drafts.count > 20
