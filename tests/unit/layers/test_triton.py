"""Triton's kernels on a machine without a GPU: interpreted, and compiled for some."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.triton_process import needs_triton, run_tests

pytestmark = needs_triton

KERNELS = ("ops", "recurrent", "experts", "grouped")


@pytest.mark.parametrize(("suffix", "interpret"), [("results", True), ("compile", False)])
def test_kernels(suffix: str, interpret: bool, tmp_path: Path) -> None:
    folder = Path(__file__).parent
    run_tests([folder / f"triton_{name}_{suffix}.py" for name in KERNELS], interpret, tmp_path)
