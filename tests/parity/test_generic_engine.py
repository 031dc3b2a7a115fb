"""Classes that transformers' modules run: logits, and what the whole engine makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.families import TOLERANCE, check, make_checkpoint
from tests.parity.generic_cases import ENGINE_CASES


@pytest.mark.tgi_pain(1)
@pytest.mark.parametrize("name", ENGINE_CASES)
def test_the_engine_generates_what_transformers_does(name: str, tmp_path: Path) -> None:
    case = ENGINE_CASES[name]
    result = check(case, make_checkpoint(case, tmp_path))
    tolerance = TOLERANCE * max(1.0, result.logit_std)
    assert result.max_logit_difference < tolerance
    assert (result.sharded_logit_difference or 0.0) < tolerance
    assert result.identical == result.compared
    assert result.identical_samples == result.samples
    assert result.sharded_run in (True, None)
    assert (result.sharded_run is None) == (result.sharded_logit_difference is None)
    assert result.preemptions > 0, "the pool is to be too small"
    assert result.reused > 0
    assert result.distinct > 1, "a model that says one thing alone shows nothing"
