"""Imports: the garbage collector meanwhile."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from tgi_cli.process.imports import importing


class Node:
    """Part of a cycle, which only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_garbage_is_collected_once_and_the_rest_is_frozen() -> None:
    with importing():
        assert not gc.isenabled()
        kept, dropped = Node(), weakref.ref(Node())
    assert dropped() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    assert not any(each is kept for each in gc.get_objects())


def test_an_error_leaves_the_collector_enabled() -> None:
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
