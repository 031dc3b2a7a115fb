"""Triton's products of dense weights with few rows, without a GPU: interpreted and compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.triton_process import needs_triton, run_tests

pytestmark = needs_triton


@pytest.mark.parametrize(
    ("file", "interpret"),
    [("triton_dense_results.py", True), ("triton_dense_compile.py", False)],
)
def test_kernels(file: str, interpret: bool, tmp_path: Path) -> None:
    run_tests([Path(__file__).parent / file], interpret, tmp_path)
