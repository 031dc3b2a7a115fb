"""Runs tests of Triton kernels in a process that interprets or compiles them.

Which of the two is settled when Triton is imported, for good, and other tests may have done that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# https://pypi.org/project/triton/#files: Linux has wheels.
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None and sys.platform != "linux", reason="Triton is for Linux"
)


def run_tests(file: Path, interpret: bool, cache: Path, timeout: float = 280) -> None:
    """Run a file of tests with pytest; fails with its output if one of them does.

    Args:
        file: of tests that are not collected by themselves.
        interpret: whether kernels are interpreted, rather than compiled.
        cache: a new folder for compiled kernels.
        timeout: in seconds.
    """
    options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(file)],
        cwd=Path(__file__).parents[2],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TRITON_CACHE_DIR": str(cache),
            "TRITON_INTERPRET": "1" if interpret else "0",
        },
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
