"""Collected by test_compiled.py: the table's cases launch every kernel of the package, and launches
are remembered."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from triton.runtime.jit import JITFunction

import tgi_cli
from tests.benchmarks.compiled.cases import all_cases
from tests.tools.triton_compiler import compile_for
from tgi_cli.device.triton_launch import CachedKernel

Kernel = tuple[str, str]
"""Module and name."""


def launched(root: Path) -> Iterator[Kernel]:
    """The functions below ``root`` that Triton compiles and the host launches on a grid."""
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "triton.jit" not in text:
            continue
        tree = ast.parse(text)
        grids = {
            node.func.value.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Subscript)
            and isinstance(node.func.value, ast.Name)
        }
        module = ".".join(path.relative_to(root.parent).with_suffix("").parts)
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef):
                continue
            jitted = any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
            # Some are launched by another module.
            if jitted and (node.name in grids or node.name.endswith("_kernel")):
                yield module, node.name


def test_the_table_has_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[Kernel] = set()

    def note(self: Any, *given: Any, **named: Any) -> None:
        seen.add((self.fn.__module__, self.fn.__name__))

    monkeypatch.setattr(JITFunction, "run", note)
    compile_for(90)
    cases = all_cases()
    assert len({(case.group, case.name) for case in cases}) == len(cases)
    for case in cases:
        case.run(90)
        assert case.work(90).keys() <= {name for _, name in seen}
    expected = set(launched(Path(tgi_cli.__file__).parent))
    assert len(expected) > 20
    assert seen == expected
    for module, name in expected:
        assert isinstance(getattr(import_module(module), name), CachedKernel), (module, name)
