"""The whole engine over classes that transformers' modules run.

Greedy tokens are transformers' through chunks that cut anywhere, preemption, three samples of a
prompt, prefix reuse in a second turn, and on two shards.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.engine_run import SAMPLED, run_engine, run_sharded_engine
from tests.parity.families import Oracle, _prompts, make_checkpoint
from tests.parity.generic_cases import ENGINE_CASES
from tgi_cli.errors import UnsupportedModelError


@pytest.mark.tgi_pain(1)
@pytest.mark.parametrize("name", ENGINE_CASES)
def test_the_engine_generates_what_transformers_does(name: str, tmp_path: Path) -> None:
    case = ENGINE_CASES[name]
    path = make_checkpoint(case, tmp_path)
    prompts = _prompts(case)
    run = run_engine(path, prompts)
    oracle = Oracle(path, case)
    for prompt, answer in zip(prompts, run.answers, strict=True):
        assert answer == likeliest(oracle, prompt, answer)
    assert run.samples == [run.answers[i] for i in SAMPLED for _ in range(2)]
    assert run.turn_answer == likeliest(oracle, run.turn, run.turn_answer)
    assert run.preemptions > 0
    assert run.reused > 0
    if not oracle.model.config.get_text_config().base_model_tp_plan:
        with pytest.raises(UnsupportedModelError, match="no plan of tensor parallelism"):
            run_sharded_engine(path, prompts, 2)
        return
    for shard in run_sharded_engine(path, prompts, 2):
        assert shard == run


def likeliest(oracle: Oracle, prompt: list[int], answer: list[int]) -> list[int]:
    """transformers' choice at each place of an answer."""
    chosen: list[int] = oracle.logits(prompt + answer)[len(prompt) - 1 : -1].argmax(-1).tolist()
    return chosen
