from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "command",
    [
        ["graphs_triton"],
        ["graphs_triton_states", "Qwen 3.5", "Granite 4"],
    ],
    ids=lambda command: command[0],
)
def test_steps_of_a_fixed_size_run_on_tritons_kernels(command: list[str]) -> None:
    """They read what the step itself writes into the buffers: no plan in between."""
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64")
    module, *names = command
    done = subprocess.run(
        [sys.executable, "-m", f"tests.unit.worker.{module}", *names],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "equal"
