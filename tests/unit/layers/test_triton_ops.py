"""Triton's kernels on a machine without a GPU: interpreted, and compiled for one.

Each happens in a process of its own: whether Triton interprets is settled when it is imported,
for good, and other tests may have done that.
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


@pytest.mark.parametrize(
    ("file", "interpret"),
    [
        ("triton_ops_results.py", "1"),
        ("triton_ops_compile.py", "0"),
        ("triton_recurrent_results.py", "1"),
        ("triton_recurrent_compile.py", "0"),
    ],
)
def test_kernels(file: str, interpret: str, tmp_path: Path) -> None:
    folder = Path(__file__).parent
    options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(folder / file)],
        cwd=folder.parents[2],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TRITON_CACHE_DIR": str(tmp_path),
            "TRITON_INTERPRET": interpret,
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
