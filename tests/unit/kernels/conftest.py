from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest

from tgi_cli.kernels import build, library

Level = Callable[[], None]


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    """However many torch has, which is one where tests run on all cores at once."""
    library.set_threads(2)
    yield
    library.set_threads(None)


@pytest.fixture(scope="session")
def compiled() -> dict[str, ctypes.CDLL]:
    """The libraries that this processor can run, by level.

    A machine without a compiler has none, and cannot test them; one that has a compiler must have
    them from the installation (``python -m tgi_cli.kernels`` after a change of the sources).
    """
    if not build.supported() or build.compiler() is None:
        pytest.skip("there is no C++ compiler here")
    paths = build.build(build.INSTALLED)
    levels = [level for level in library.runnable_levels() if level in paths]
    return {level: library.open_library(paths[level]) for level in levels}


@pytest.fixture(params=list(build.LEVELS))
def level(
    request: pytest.FixtureRequest,
    compiled: dict[str, ctypes.CDLL],
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """Each level in turn, as if the processor had no better one."""
    name: str = request.param
    if name not in compiled:
        pytest.skip(f"this processor has no {name}")
    monkeypatch.setattr(library, "_load", lambda: compiled[name])
    return name
