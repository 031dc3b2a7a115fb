"""Remembered launches: those that Triton would make, of the variants that it would choose.

In a process of its own, where Triton does not interpret.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# https://pypi.org/project/triton/#files: Linux has wheels.
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None and sys.platform != "linux", reason="Triton is for Linux"
)


@pytest.mark.timeout(300)
def test_launches() -> None:
    folder = Path(__file__).parent
    options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(folder / "triton_launches.py")],
        cwd=folder.parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
