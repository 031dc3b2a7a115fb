"""Translates errors of llguidance (https://github.com/guidance-ai/llguidance) for API users.

Its own messages name the parser's parts and their state.
"""

from __future__ import annotations

import re

NOTHING_FITS = "NoExtensionBias"
"""llguidance's error for a text that no token can continue, and that may not end."""
_LARGE = "it is too large: its regular expressions, enumerations and repetitions together"
_MANY = "too many of its rules may apply at one place of the text: at most {most} are followed"
_COMPLEX = (
    "its regular expressions have too many ways to match the same text: use fewer repetitions "
    "that may overlap"
)
_LIMITS = (
    (re.compile(r"Current row has \d+ items; max is (?P<most>\d+)"), _MANY),
    (re.compile(r"Too many items \(limit (?P<most>\d+)"), _MANY),
    (re.compile(r"too many expressions constructed|too many states: |relevance"), _COMPLEX),
    (re.compile(r"\(grammar\) too big|number of symbols\) too big|schema too large"), _LARGE),
    (re.compile(r"too deeply nested|nested too deep|recursion"), "it is nested too deeply"),
)


def limit_passed(error: str) -> str:
    """Describe the limit of llguidance that an error reports; empty if it reports none."""
    for pattern, words in _LIMITS:
        if found := pattern.search(error):
            return words.format(**found.groupdict())
    return ""
