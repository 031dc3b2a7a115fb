"""tgi: serve language models on your own machine, as Text Generation Inference did.

The Python API is :class:`LLM`. Its modules are imported on first access, so that importing the
package is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tgi_cli.version import __version__

if TYPE_CHECKING:
    from tgi_cli.llm import (
        LLM,
        BeamHypothesis,
        Completion,
        EngineDeadError,
        GenerationError,
        GenerationOptions,
        Piece,
        Stream,
    )
    from tgi_cli.sampling.params import SamplingParams


__all__ = [
    "LLM",
    "BeamHypothesis",
    "Completion",
    "EngineDeadError",
    "GenerationError",
    "GenerationOptions",
    "Piece",
    "SamplingParams",
    "Stream",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "tgi_cli.sampling.params" if name == "SamplingParams" else "tgi_cli.llm"
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
