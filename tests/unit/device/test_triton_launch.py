"""Remembered launches: those that Triton would make, of the variants that it would choose."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.triton_process import needs_triton, run_tests

pytestmark = needs_triton


@pytest.mark.timeout(300)
def test_launches(tmp_path: Path) -> None:
    run_tests([Path(__file__).parent / "triton_launches.py"], interpret=False, cache=tmp_path)
