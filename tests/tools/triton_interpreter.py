"""Makes Triton's interpreter faster; a plugin of pytest's in processes that interpret.

The interpreter replaces the functions of Triton's language by its own when a kernel is launched,
and again at each call of a function within a kernel, such as ``tl.sum``. To look through the
language for what to replace takes longer than most kernels do on small tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


class _Kept:
    """In place of a scope, whose end would undo the replacement."""

    def restore(self) -> None:
        pass


def dot(_: Any, a: Any, b: Any, sums: Any, *__: object) -> Any:
    """A product as a GPU makes it, to replace ``InterpreterBuilder.create_dot`` in tests.

    The interpreter would take bfloat16's bits for integers. In float64, so that rounding hides the
    order of a sum: OpenBLAS sums up a row of float32 in an order that depends on the number of rows
    on some processors, which tensor cores do not.
    """
    a_data, b_data = (
        (factor.data.astype(np.uint32) << 16).view(np.float32)
        if factor.dtype.scalar == tl.bfloat16
        else factor.data
        for factor in (a, b)
    )
    total = np.matmul(a_data, b_data, dtype=np.float64) + sums.data
    return interpreter.TensorHandle(total.astype(sums.data.dtype), sums.dtype.scalar)


def replace_once() -> None:
    """Let the interpreter replace functions once for each kernel, and for good."""
    replace = interpreter._patch_lang

    @cache
    def replace_for(function: Callable[..., Any]) -> _Kept:
        replace(function)
        # Triton 3.6 asks NumPy for the int of an array of one dimension, which 2.4 refuses.
        tl.tensor.__index__ = _index
        return _Kept()

    interpreter._patch_lang = replace_for


def _index(number: Any) -> int:
    """Of a tensor with one element, as a bound of a loop."""
    return int(number.handle.data.item())


def pytest_configure() -> None:
    replace_once()
