"""The table of compiled kernels knows all of them."""

from __future__ import annotations

from pathlib import Path

from tests.tools.triton_process import needs_triton, run_tests


@needs_triton
def test_the_table() -> None:
    run_tests([Path(__file__).parent / "compiled" / "triton_table.py"], interpret=False)
