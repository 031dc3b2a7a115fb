from __future__ import annotations

import os
import subprocess
import sys

import pytest


def test_steps_of_a_fixed_size_run_on_tritons_attention():
    """Its kernels read what the step itself writes into the buffers: no plan in between."""
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64")
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.worker.graphs_triton"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "equal"
