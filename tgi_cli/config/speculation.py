"""Reads ``--speculate`` and vLLM's ``--speculative-config``.

https://docs.vllm.ai/en/latest/features/spec_decode/
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

AUTO = "auto"
"""In place of a number of drafts: chosen by the device."""

DEFAULT_CPU_DRAFTS = 7
"""Drafts of a sequence in one step on a CPU: with the token before them 8 rows, which cost little
more than one. How many of them a step verifies follows from measured costs."""

METHODS = ("ngram", "suffix")
"""vLLM's methods without weights."""

_LARGEST = (1 << 31) - 1
_SHOWN = 40
"""Characters of an invalid value that an error message repeats."""

_ADAPTS = "the number of drafts always follows the measured durations of steps; leave it out"
_ANY_LENGTH = "matches of any length are used; leave it out"
_ADVICE = {
    "disable_by_batch_size": _ADAPTS,
    "enable_adaptive_verification": _ADAPTS,
    "num_speculative_tokens_per_batch_size": _ADAPTS,
    "prompt_lookup_max": _ANY_LENGTH,
    "prompt_lookup_min": _ANY_LENGTH,
    "suffix_decoding_max_spec_factor": _ANY_LENGTH,
    "suffix_decoding_max_tree_depth": _ANY_LENGTH,
}
"""What to do instead of naming a key."""


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The part of vLLM's configuration that is supported.

    Attributes:
        method: ``ngram`` looks drafts up in a request's own tokens, ``suffix`` in recent answers,
            too.
        num_speculative_tokens: maximum drafts of a sequence in one step, or None for the default.
    """

    method: str = "suffix"
    num_speculative_tokens: int | None = None

    @classmethod
    def read(cls, word: str) -> SpeculativeConfig:
        """Parse the JSON object. Raises ValueError with what is not supported."""
        try:
            values = json.loads(word)
        except (ValueError, RecursionError):
            raise ValueError(f"{word[:_SHOWN]!r} is not JSON") from None
        if not isinstance(values, dict):
            raise ValueError('it is not a JSON object, as {"method": "ngram"}')
        given = {key: value for key, value in values.items() if value is not None}
        model = given.pop("model", None)
        method = given.pop("method", None)
        if model in ("ngram", "[ngram]"):  # vLLM's older form
            model, method = None, method or "ngram"
        method = "suffix" if method is None else method
        if method not in METHODS:
            raise ValueError(
                f"method {_shown(method)} is not supported; one of: {', '.join(METHODS)}"
            )
        if model is not None:
            raise ValueError("model: draft models and heads are not supported")
        count = given.pop("num_speculative_tokens", None)
        if count is not None and not (type(count) is int and 1 <= count <= _LARGEST):
            raise ValueError(
                f"num_speculative_tokens: {_shown(count)} is not a whole number above 0"
            )
        for key in given:
            advice = _ADVICE.get(key)
            raise ValueError(f"{key[:_SHOWN]} is not supported{f': {advice}' if advice else ''}")
        return cls(method, count)


def _shown(value: Any) -> str:
    return repr(value)[:_SHOWN]


def checked(word: str) -> str:
    """The word of ``--speculative-config``, if it is valid. Raises ValueError."""
    SpeculativeConfig.read(word)
    return word
