"""Imports of many modules, in processes that keep them until they end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Collect garbage once after the block, and never walk what it leaves again.

    While modules are imported, Python walks all objects several times as their number grows. Those
    of torch take 0.1 s, and so does each later collection unless they are frozen.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
    gc.collect()
    gc.freeze()
