"""Runs tests of Triton kernels in a process that interprets or compiles them.

Which of the two is settled when Triton is imported, for good, and other tests may have done that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

# https://pypi.org/project/triton/#files: Linux has wheels.
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None and sys.platform != "linux", reason="Triton is for Linux"
)

_PLUGINS = ("cacheprovider", "xdist", "schemathesis")
"""Of pytest's, which such a process would import for nothing."""


def run_tests(
    files: Sequence[Path], interpret: bool, cache: Path | None = None, timeout: float = 280
) -> None:
    """Run files of tests with pytest in one process; fails with its output if one of them does.

    Args:
        files: of tests that are not collected by themselves.
        interpret: whether kernels are interpreted, rather than compiled.
        cache: a new folder for compiled kernels, if any are compiled.
        timeout: in seconds.
    """
    options = ["-q", "-W", "ignore", *(f"-pno:{name}" for name in _PLUGINS)]
    if interpret:
        options += ["-p", "tests.tools.triton_interpreter"]
    environment = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1" if interpret else "0"}
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, files)],
        cwd=Path(__file__).parents[2],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
