"""The Python API: the engine in the caller's own process, without HTTP.

:class:`LLM` is all of it. Nothing here imports torch until an ``LLM`` is made.
"""

from tgi_cli.offline.beam import BeamHypothesis
from tgi_cli.offline.errors import EngineDeadError, GenerationError
from tgi_cli.offline.llm import LLM
from tgi_cli.offline.options import GenerationOptions
from tgi_cli.offline.outputs import Completion, Piece
from tgi_cli.offline.stream import Stream

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
