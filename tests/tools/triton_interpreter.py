"""Makes Triton's interpreter faster; a plugin of pytest's in processes that interpret.

The interpreter replaces the functions of Triton's language by its own when a kernel is launched,
and again at each call of a function within a kernel, such as ``tl.sum``. To look through the
language for what to replace takes longer than most kernels do on small tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

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


def pytest_configure() -> None:
    replace_once()
