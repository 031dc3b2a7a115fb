"""Graphs over Triton's kernels, interpreted on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

from tests.tools.triton_process import needs_triton, run_tests

pytestmark = needs_triton


def test_steps_of_a_fixed_size_run_on_tritons_kernels() -> None:
    """They read what the step itself writes into the buffers: no plan in between."""
    folder = Path(__file__).parent
    run_tests([folder / "graphs_triton.py", folder / "graphs_triton_states.py"], interpret=True)
