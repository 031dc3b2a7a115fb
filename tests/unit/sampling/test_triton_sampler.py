"""The sampler's Triton kernel on a machine without a GPU: interpreted, and compiled for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.triton_process import needs_triton, run_tests

pytestmark = needs_triton


@pytest.mark.parametrize(
    ("file", "interpret"),
    [("triton_sampler_results.py", True), ("triton_sampler_compile.py", False)],
)
def test_kernel(file: str, interpret: bool, tmp_path: Path) -> None:
    run_tests([Path(__file__).parent / file], interpret, tmp_path)
