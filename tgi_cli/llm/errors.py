"""Errors of submitted requests."""

from __future__ import annotations

from collections.abc import Sequence

from tgi_cli.errors import TgiError
from tgi_cli.llm.outputs import Completion


class EngineDeadError(TgiError):
    """The engine's loop has ended: it failed, or the LLM was closed. Create a new LLM."""


class GenerationError(TgiError):
    """Some requests failed; all others of the call are finished.

    Attributes:
        completions: The completions of the call. Those that failed have the finish reason
            ``error``, the cause in ``error`` and the text so far.
    """

    def __init__(self, cause: str, completions: Sequence[Completion], remedy: str = "") -> None:
        super().__init__(cause, remedy)
        self.completions = list(completions)

    @classmethod
    def of(cls, completions: Sequence[Completion]) -> GenerationError:
        """The error for completions of which at least one failed."""
        failed = [c for c in completions if c.finish_reason == "error"]
        cause = failed[0].error
        if len(completions) > 1:
            cause = f"{len(failed)} of {len(completions)} requests failed; the first: {cause}"
        return cls(cause, completions)
