"""What all tests rely on."""

from __future__ import annotations

import atexit
import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A shell that starts a test run in the background lets it ignore Ctrl-C, nohup SIGHUP, and a
# process hands that on to its children: tests of these signals would then test nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How busy the machine is says nothing of us.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
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


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist's, which need not be there
def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores: tests of servers often wait for them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (cores or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort files with slow tests first, and spread the files of each folder over the others' time.

    So no process is left with a slow file at the end, and while one waits for a server, others
    compute. Tests of a file keep their order.
    """
    here = Path(__file__).parent
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    folders: dict[str, list[Path]] = {}
    for path in dict.fromkeys(item.path for item in items):
        if path not in slow:
            folders.setdefault(path.relative_to(here).parts[0], []).append(path)
    places = {
        path: (index + 0.5) / len(files)
        for files in folders.values()
        for index, path in enumerate(files)
    }
    items.sort(key=lambda item: places.get(item.path, 0.0))


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


@pytest.fixture(autouse=True, scope="session")
def _checkpoints_kept(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let all processes of a run make each miniature once: see tests/parity/families.py."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    os.environ.setdefault("TGI_TEST_CHECKPOINTS", str(folder / "checkpoints"))


@pytest.fixture(autouse=True, scope="module")
def _heap_frozen_for_module() -> None:
    freeze_heap()
