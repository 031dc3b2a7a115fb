"""Compile the C++ kernels: at installation where there is a compiler, or later into a cache.

One shared library per level of the instruction set, with a plain C interface: it depends on
neither Python's nor torch's version, only on the sources, whose digest is in its name.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "cpp"
INSTALLED = Path(__file__).parent / "lib"
"""Folder of libraries compiled at installation."""

LEVELS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "avx512_bf16": (
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"}),
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512"),
    ),
    "avx512_vnni": (
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512_vnni"}),
        ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"),
    ),
    "avx512": (
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}),
        ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    ),
    "avx2_vnni": (
        frozenset({"avx2", "fma", "f16c", "bmi2", "avx_vnni"}),
        ("-march=x86-64-v3", "-mavxvnni"),
    ),
    "avx2": (frozenset({"avx2", "fma", "f16c", "bmi2"}), ("-march=x86-64-v3",)),
}
"""Levels, best first: the processor's features that one needs, and the compiler's flags."""

OnProgress = Callable[[int, int], None]
"""Called with the numbers of compiled files and of all files."""

_FLAGS = ("-std=gnu++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wno-psabi")


class BuildError(Exception):
    """The kernels cannot be compiled here; the message has the reason."""


def supported() -> bool:
    """Whether there is anything to compile for this machine."""
    return platform.system() == "Linux" and platform.machine() in ("x86_64", "AMD64")


def compiler() -> str | None:
    """The C++ compiler: ``$CXX``, else the first of the usual names that is there."""
    requested = os.environ.get("CXX")
    for name in [requested] if requested else ["g++", "clang++", "c++"]:
        if found := shutil.which(name):
            return found
    return None


def digest() -> str:
    """A digest of the sources and flags that the libraries are built from."""
    flags = [_FLAGS, *(flags for _, flags in LEVELS.values())]
    state = hashlib.blake2b(repr(flags).encode(), digest_size=6)
    for source in sorted(SOURCES.iterdir()):
        state.update(source.name.encode() + b"\0" + source.read_bytes())
    return state.hexdigest()


def file_name(level: str) -> str:
    """The file name of a level's library."""
    return f"tgi-kernels-{digest()}-{level}.so"


def cache_folder() -> Path:
    """Folder of libraries that were not compiled at installation."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tgi" / "kernels"


def build(
    folder: Path,
    levels: Iterable[str] = tuple(LEVELS),
    on_progress: OnProgress = lambda compiled, total: None,
) -> dict[str, Path]:
    """Compile the libraries missing in ``folder``; 20 to 70 s of one core per level.

    Levels that the compiler is too old for are left out.

    Returns:
        The libraries by level, in the order of ``levels``.

    Raises:
        BuildError: no compiler, or it failed, or it is too old for all levels.
        OSError: the folder cannot be written.
    """
    if not supported():
        raise BuildError(f"no kernels for {platform.system()} on {platform.machine()}")
    cxx = compiler()
    if cxx is None:
        raise BuildError("no C++ compiler was found (g++ or clang++; CXX names another)")
    folder.mkdir(parents=True, exist_ok=True)
    paths = {level: folder / file_name(level) for level in levels}
    known = [level for level, path in paths.items() if path.exists() or _knows(cxx, level)]
    if not known:
        raise BuildError(f"{Path(cxx).name} is too old for {' and '.join(paths)}")
    wanted = {level: paths[level] for level in known}
    missing = {level: path for level, path in wanted.items() if not path.exists()}
    if missing:
        with (
            tempfile.TemporaryDirectory(dir=folder) as scratch,
            ThreadPoolExecutor(_jobs()) as pool,
        ):
            objects = {
                level: [
                    pool.submit(
                        _compile, cxx, source, Path(scratch) / f"{source.stem}-{level}.o", level
                    )
                    for source in sorted(SOURCES.glob("*.cpp"))
                ]
                for level in missing
            }
            total, compiled = sum(map(len, objects.values())), 0
            for level, path in missing.items():
                made = []
                for job in objects[level]:
                    made.append(job.result())
                    compiled += 1
                    on_progress(compiled, total)
                whole = Path(scratch) / path.name
                # Without libgomp: the library is given torch's.
                _run([cxx, "-shared", "-o", str(whole), *map(str, made)])
                whole.replace(path)
    if folder == INSTALLED:
        for stale in folder.glob("tgi-kernels-*.so"):
            if digest() not in stale.name:
                stale.unlink()
    return wanted


def find(level: str) -> Path | None:
    """The library of a level, from the installation or the cache."""
    paths = (folder / file_name(level) for folder in (INSTALLED, cache_folder()))
    return next((path for path in paths if path.exists()), None)


def build_for_use(
    levels: Sequence[str], on_progress: OnProgress = lambda compiled, total: None
) -> tuple[str, Path]:
    """The first of these levels that is there or can be compiled, and its library.

    Raises:
        BuildError, OSError: as :func:`build`.
    """
    cxx = compiler()
    for level in levels:
        if path := find(level):
            return level, path
        if cxx is not None and _knows(cxx, level):
            levels = [level]
            break
    # If this user may not write the installation, as in a container, the cache is used.
    folder = INSTALLED if _writable(INSTALLED) else cache_folder()
    ((level, path),) = build(folder, levels, on_progress).items()
    return level, path


def _writable(folder: Path) -> bool:
    return os.access(folder if folder.exists() else folder.parent, os.W_OK)


def _jobs() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _knows(cxx: str, level: str) -> bool:
    """Whether the compiler has the instructions of a level."""
    command = [cxx, *LEVELS[level][1], "-E", "-x", "c++", os.devnull, "-o", os.devnull]
    try:
        return not subprocess.run(command, capture_output=True, check=False).returncode
    except OSError as error:
        raise BuildError(f"{cxx}: {error}") from error


def _compile(cxx: str, source: Path, target: Path, level: str) -> Path:
    _run([cxx, *_FLAGS, *LEVELS[level][1], "-c", "-o", str(target), str(source)])
    return target


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise BuildError(f"{Path(command[0]).name} failed: {lines[0].strip()}")
