"""Matches untrusted regular expressions of checkpoints and adapters within a time limit.

A few characters (``(a+)+$``) can keep a backtracking engine busy forever, and checkpoint formats
name modules by such expressions. :mod:`regex` is compatible with :mod:`re` and has timeouts:
https://github.com/mrabarnett/mrab-regex
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import regex

SECONDS = 5.0
"""Time limit of all matches of a set of patterns. Ten patterns over the 70,000 modules of a large
mixture of experts take half a second."""

CHARACTERS = 4096
"""Maximum length of a pattern."""


class PatternError(ValueError):
    """A pattern that is invalid, too long, or takes too long."""


class Patterns:
    """Matches untrusted patterns for at most ``seconds`` in all."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._left = seconds

    def match(self, pattern: str, text: str) -> bool:
        """Whether the beginning of ``text`` matches. Raises PatternError."""
        return self._run(pattern, text, whole=False)

    def fullmatch(self, pattern: str, text: str) -> bool:
        """Whether all of ``text`` matches. Raises PatternError."""
        return self._run(pattern, text, whole=True)

    def _run(self, pattern: str, text: str, whole: bool) -> bool:
        compiled = _compiled(pattern)
        began = time.perf_counter()
        try:
            matches = compiled.fullmatch if whole else compiled.match
            return matches(text, timeout=max(self._left, 1e-3)) is not None
        except TimeoutError:
            raise PatternError(
                f"the pattern {pattern[:80]!r} takes too long to match {text[:80]!r}"
            ) from None
        finally:
            self._left -= time.perf_counter() - began


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> regex.Pattern[str]:
    if len(pattern) > CHARACTERS:
        raise PatternError(f"a pattern has more than {CHARACTERS} characters")
    import regex  # few checkpoints and adapters have patterns

    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise PatternError(f"{pattern[:80]!r} is not a regular expression: {error}") from error
