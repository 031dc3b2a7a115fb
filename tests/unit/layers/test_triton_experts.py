"""Triton kernels of experts and adapters on a machine without a GPU: interpreted and compiled.

Each happens in a process of its own: whether Triton interprets is settled when it is imported.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.triton_process import needs_triton, run_tests

pytestmark = needs_triton


@pytest.mark.parametrize(
    ("file", "interpret"),
    [("triton_experts_results.py", True), ("triton_experts_compile.py", False)],
)
def test_kernels(file: str, interpret: bool, tmp_path: Path) -> None:
    run_tests(Path(__file__).parent / file, interpret, tmp_path)
