"""What all tests rely on."""

from __future__ import annotations

import atexit
import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# A shell that starts a test run in the background lets it ignore Ctrl-C, nohup SIGHUP, and a
# process hands that on to its children: tests of these signals would then test nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile("untimed", deadline=None)  # how busy the machine is says nothing of us
settings.load_profile("untimed")

# Processes of pytest-xdist share the cores, and so do the servers that tests start. torch reads it
# when it is imported. Tests of what several threads compute set their number themselves.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    gc.disable()  # until the tests are collected: hardly anything that imports make is garbage


def _silence() -> None:
    """Drop what is written to stderr from here on.

    At the end of a process that has used Triton, its bindings list every type and function that the
    interpreter still knew (https://nanobind.readthedocs.io/en/latest/refleaks.html). They offer no
    switch for it to Python.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


atexit.register(_silence)  # first, and thus run last

FOLDERS = ("system", "parity", "benchmarks", "unit", "cli", "router")
"""In the order in which their files are run."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort files with slow tests first, so that no process is left with one; then by folder.

    Tests of a file keep their order.
    """
    places = {name: place for place, name in enumerate(FOLDERS)}
    here = Path(__file__).parent
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def place(item: pytest.Item) -> tuple[bool, int]:
        folder = item.path.relative_to(here).parts[0]
        return item.path not in slow, places.get(folder, len(places))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """See :func:`freeze_heap`, which the import of all tests makes worthwhile."""
    freeze_heap()
    gc.enable()


def freeze_heap() -> None:
    """Exclude all objects alive from garbage collections to come.

    Each load and each warm-up of a model collects: beside all of transformers and thousands of
    tests, that takes longer than the rest of it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _heap_frozen_for_module() -> None:
    freeze_heap()
