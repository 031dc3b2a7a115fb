"""tgi: serve language models on your own machine, as Text Generation Inference did.

The Python API is :class:`LLM`; it and what belongs to it are imported when they are asked for,
so that the package itself costs nothing.
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


_HOMES = {
    "LLM": "tgi_cli.llm",
    "BeamHypothesis": "tgi_cli.llm",
    "Completion": "tgi_cli.llm",
    "EngineDeadError": "tgi_cli.llm",
    "GenerationError": "tgi_cli.llm",
    "GenerationOptions": "tgi_cli.llm",
    "Piece": "tgi_cli.llm",
    "SamplingParams": "tgi_cli.sampling.params",
    "Stream": "tgi_cli.llm",
}

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
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
