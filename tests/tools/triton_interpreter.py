"""Makes Triton's interpreter faster and exact; a plugin of pytest's in processes that interpret.

The interpreter replaces the functions of Triton's language by its own when a kernel is launched,
and again at each call of a function within a kernel, such as ``tl.sum``. To look through the
language for what to replace takes longer than most kernels do on small tensors.

NumPy multiplies matrices by OpenBLAS, whose kernels for some processors sum up a row in an order
that depends on the number of rows. Tensor cores do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy
from triton import language
from triton.runtime import interpreter


class _Kept:
    """In place of a scope, whose end would undo the replacement."""

    def restore(self) -> None:
        pass


def replace_once() -> None:
    """Let the interpreter replace functions once for each kernel, and for good."""
    replace = interpreter._patch_lang

    @cache
    def replace_for(function: Callable[..., Any]) -> _Kept:
        replace(function)
        return _Kept()

    interpreter._patch_lang = replace_for


def sum_exactly() -> None:
    """Compute float32 products in float64, so that rounding hides the order of a sum."""
    dot = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
        if total.data.dtype != numpy.float32:
            return dot(builder, a, b, total, *options)
        wide = interpreter.TensorHandle(total.data.astype(numpy.float64), language.float64)
        exact = dot(builder, a, b, wide, *options)
        return interpreter.TensorHandle(exact.data.astype(numpy.float32), total.dtype)

    interpreter.InterpreterBuilder.create_dot = create_dot


def pytest_configure() -> None:
    replace_once()
    sum_exactly()
