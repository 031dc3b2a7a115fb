"""What can go wrong once requests are with the engine."""

from __future__ import annotations

from collections.abc import Sequence

from tgi_cli.errors import TgiError
from tgi_cli.llm.outputs import Completion


class EngineDeadError(TgiError):
    """The engine's loop has ended: it failed, or the LLM was closed. Make a new LLM."""


class GenerationError(TgiError):
    """Some requests failed; all others of the call were finished first.

    Attributes:
        completions: of the whole call, as it would have returned them. Those that failed have
            the finish reason ``error``, the cause in ``error`` and what they had generated.
    """

    def __init__(self, cause: str, completions: Sequence[Completion], remedy: str = "") -> None:
        super().__init__(cause, remedy)
        self.completions = list(completions)

    @classmethod
    def of(cls, completions: Sequence[Completion]) -> GenerationError:
        """Of a call whose ``completions`` hold at least one that failed."""
        failed = [c for c in completions if c.finish_reason == "error"]
        cause = failed[0].error
        if len(completions) > 1:
            cause = f"{len(failed)} of {len(completions)} requests failed; the first: {cause}"
        return cls(cause, completions)
