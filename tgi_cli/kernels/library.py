"""Loads the compiled kernels."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from tgi_cli.kernels import build

log = logging.getLogger(__name__)

_CPUINFO = Path("/proc/cpuinfo")

_TRUE = frozenset({"true", "1", "yes", "on", "t", "y"})

_wanted = os.environ.get("DISABLE_CUSTOM_KERNELS", "").strip().lower() not in _TRUE
_switched_off = not _wanted
_threads: int | None = None


def cpp_library() -> ctypes.CDLL | None:
    """The library for this processor, or None to use torch's operations.

    Its functions take pointers and numbers; :mod:`tgi_cli.kernels` has the callers. It never
    compiles anything: see :func:`tgi_cli.kernels.build.build`.
    """
    return None if _switched_off else _load()


def custom_kernels_enabled() -> bool:
    """Whether custom kernels may be used: DISABLE_CUSTOM_KERNELS turns them off."""
    return _wanted


def describe_kernels() -> str:
    """A description of the kernels on this CPU, with the remedy if they are slow."""
    if not _wanted:
        return "torch: slower, as DISABLE_CUSTOM_KERNELS is set"
    if not runnable_levels():
        return "torch: there are none for this processor"
    if (library := cpp_library()) is not None:
        return level_of(Path(library._name)).replace("_", " ")
    if build.compiler() is None:
        return "torch: slower; install g++, and tgi warmup compiles them"
    return "torch: slower; tgi warmup compiles them"


def runnable_levels() -> list[str]:
    """The levels whose features the processor has, best first."""
    if not build.supported():
        return []
    has = cpu_features()
    return [name for name, (needs, _) in build.LEVELS.items() if needs <= has]


def level_of(path: Path) -> str:
    """The level of a library."""
    return path.stem.rpartition("-")[2]


@contextmanager
def without_cpp_kernels() -> Iterator[None]:
    """Turn the kernels off within the block, for comparisons with torch's operations."""
    global _switched_off
    before, _switched_off = _switched_off, True
    try:
        yield
    finally:
        _switched_off = before


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library, which starts threads of its own at first use.

    Raises:
        OSError: it cannot be loaded.
    """
    return ctypes.CDLL(str(path))


def threads() -> int:
    """Number of threads that the kernels compute with."""
    return torch.get_num_threads() if _threads is None else _threads


def set_threads(count: int | None) -> None:
    """Set the number of the kernels' threads; None for as many as torch's."""
    global _threads
    _threads = count


@cache
def _load() -> ctypes.CDLL | None:
    levels = runnable_levels()
    for path in filter(None, map(build.find, levels)):
        try:
            library = open_library(path)
        except OSError as error:
            log.warning("%s cannot be used: %s", path, error)
            continue
        log.debug("kernels: %s", path)
        return library
    if levels:
        log.warning(
            "no kernels for this processor were compiled, torch's operations are used: several "
            "times slower; with a C++ compiler, `tgi warmup` compiles them"
        )
    return None


def cpu_features() -> frozenset[str]:
    try:
        lines = _CPUINFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), ":")
    return frozenset(flags.partition(":")[2].split())
