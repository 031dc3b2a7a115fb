"""Triton's kernels on a machine without a GPU: interpreted, and compiled for some.

In processes that run many files each: importing torch and Triton takes seconds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.triton_process import needs_triton, run_tests

UNIT = Path(__file__).parents[1]
RESULTS = sorted(UNIT.rglob("triton_*_results.py"))
COMPILED = sorted(UNIT.rglob("triton_*_compile.py"))

pytestmark = [needs_triton, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("attention", [True, False], ids=["attention", "others"])
def test_results_are_those_of_the_references(attention: bool, tmp_path: Path) -> None:
    files = [file for file in RESULTS if (file.parent.name == "attention") == attention]
    assert files
    run_tests(files, True, tmp_path)


def test_kernels_compile_and_remembered_launches_are_tritons(tmp_path: Path) -> None:
    assert COMPILED
    run_tests([*COMPILED, UNIT / "device" / "triton_launches.py"], False, tmp_path)
