"""Every built-in family generates what transformers' implementation of it generates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.cases import CASES
from tests.parity.families import TOLERANCE, check, make_checkpoint


@pytest.mark.tgi_pain(1)
@pytest.mark.parametrize("name", CASES)
def test_parity_with_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    result = check(case, make_checkpoint(case, tmp_path / "model"))
    assert result.max_logit_difference < TOLERANCE
    assert result.sharded_logit_difference is not None
    assert result.sharded_logit_difference < TOLERANCE
    assert 0.5 < result.logit_std < 5, "the tolerance is to mean something"
    assert result.identical == result.compared
    assert result.identical_samples == result.samples
    assert result.sharded_run
    assert result.preemptions > 0, "the pool is to be too small"
    assert result.reused > 0, "a second turn begins as the first ended"
    assert result.distinct > result.compared / 8, "a model that repeats itself shows little"
