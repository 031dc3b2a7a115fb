"""The Python API: the engine in the caller's own process, without HTTP.

:class:`LLM` is all of it. Nothing here imports torch until an ``LLM`` is made.
"""

from tgi_cli.llm.beam import BeamHypothesis
from tgi_cli.llm.llm import LLM
from tgi_cli.llm.options import GenerationOptions
from tgi_cli.llm.outputs import Completion, EngineDeadError, GenerationError, Piece
from tgi_cli.llm.stream import Stream

__all__ = [
    "LLM",
    "BeamHypothesis",
    "Completion",
    "EngineDeadError",
    "GenerationError",
    "GenerationOptions",
    "Piece",
    "Stream",
]
