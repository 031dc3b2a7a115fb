"""Drafters with weights on two shards, in two processes: the answers of two shards without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parity.cases import CASES
from tests.parity.test_draft_heads import GREEDY, HEADS, LIMITS, PROMPTS, SAMPLED, Nothing, perfect
from tests.tools.checkpoints import make_llama
from tests.tools.draft_heads import add_mtp
from tests.tools.miniatures import make_miniature, write_byte_tokenizer
from tgi_cli import LLM
from tgi_cli.config import EngineConfig
from tgi_cli.engine.speculation import create_speculator
from tgi_cli.engine.speculation.adaptive import AdaptiveSpeculator
from tgi_cli.engine.speculation.step_costs import StepCosts
from tgi_cli.engine.step import StepTime
from tgi_cli.kernels import cpp_library
from tgi_cli.llm import load

pytestmark = pytest.mark.slow

FREE = (StepTime(1, 1, 8, 1.0), StepTime(1, 64, 8, 1.0))


@pytest.fixture(autouse=True)
def _free_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for one shard; but steps are timed, which all shards do together."""
    if cpp_library() is None:
        pytest.skip("torch's products differ by the number of rows, in their last bits")

    def create(config: EngineConfig, _: object, most: int = 0) -> AdaptiveSpeculator | None:
        return create_speculator(config, FREE, most)

    monkeypatch.setattr(load, "create_speculator", create)
    monkeypatch.setattr("tgi_cli.engine.speculation.LookupDrafter", lambda _: Nothing())
    monkeypatch.setattr(StepCosts, "learn", lambda *_: None)
    monkeypatch.setattr(StepCosts, "learn_proposing", lambda *_: None)


class Counted:
    """Counts steps, and the draft tokens that they verify."""

    def __init__(self) -> None:
        self.steps = self.drafts = 0

    def __call__(self, stats: str) -> None:
        self.steps += 1
        self.drafts += json.loads(stats)["Draft Tokens"]


SHARDED = ("eagle3 of speculators", "medusa", "mlp")
"""Heads with what shards share out: an embedding of their own, a vocabulary of their own, heads of
their own. The target's embedding and head serve the layers for multi-token prediction, and the
head that is right."""


def answers(llm: LLM) -> list[list[int]]:
    done = llm.generate(PROMPTS, [GREEDY, SAMPLED] * 3, max_new_tokens=40, ignore_eos=True)
    return [each.token_ids for each in done]


def sharded(target: Path, **settings: Any) -> LLM:
    return LLM(target, num_shard=2, **LIMITS, **settings)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_llama(tmp_path_factory.mktemp("target"), num_hidden_layers=6)
    write_byte_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def known() -> dict[Path, list[list[int]]]:
    """The answers of two shards without drafts."""
    return {}


@pytest.fixture
def expected(known: dict[Path, list[list[int]]]) -> Callable[[Path], list[list[int]]]:
    def ask(target: Path) -> list[list[int]]:
        if target not in known:
            with sharded(target, speculate=0) as llm:
                known[target] = answers(llm)
        return known[target]

    return ask


@pytest.fixture
def compare(expected: Callable[[Path], list[list[int]]]) -> Callable[..., None]:
    def check(target: Path, **settings: Any) -> None:
        wanted, counted = expected(target), Counted()
        with sharded(target, on_stats=counted, **settings) as llm:
            assert answers(llm) == wanted
        assert counted.drafts > 20

    return check


@pytest.mark.parametrize("name", SHARDED)
def test_heads_are_on_every_shard(
    name: str, target: Path, tmp_path: Path, compare: Callable[..., None]
) -> None:
    compare(target, speculative_model=str(HEADS[name](tmp_path)))


def test_mtp_layers_are_on_every_shard(tmp_path: Path, compare: Callable[..., None]) -> None:
    path = add_mtp(make_miniature(CASES["DeepSeek V3"], tmp_path))
    compare(path, speculative_config={"method": "mtp"})


def test_a_draft_model_on_the_first_shard_saves_steps(
    target: Path, expected: Callable[[Path], list[list[int]]]
) -> None:
    """Its model is the target's: sums of shards differ from its own in bits alone."""
    wanted, counted = expected(target), Counted()
    with sharded(target, speculative_model=str(target), on_stats=counted) as llm:
        assert answers(llm) == wanted
        assert counted.drafts > 20
        llm.generate([PROMPTS[0]], GREEDY, max_new_tokens=60, ignore_eos=True)
        before = counted.steps
        (done,) = llm.generate([PROMPTS[1]], GREEDY, max_new_tokens=61, ignore_eos=True)
    assert len(done.token_ids) == 61
    assert counted.steps - before < 40


def test_a_head_that_is_right_is_always_accepted(tmp_path: Path) -> None:
    silent, head = perfect(tmp_path, tmp_path)
    counted = Counted()
    with sharded(silent, speculative_model=str(head), speculate=4, on_stats=counted) as llm:
        llm.generate([PROMPTS[0]], GREEDY, max_new_tokens=60, ignore_eos=True)
        before = counted.steps
        (done,) = llm.generate([PROMPTS[1]], GREEDY, max_new_tokens=61, ignore_eos=True)
    assert len(done.token_ids) == 61
    assert counted.steps - before <= 2 + 60 // 5 + 2
