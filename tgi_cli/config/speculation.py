"""Reads ``--speculate``, ``--speculative-model`` and vLLM's ``--speculative-config``.

https://docs.vllm.ai/en/latest/features/spec_decode/
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

AUTO = "auto"
"""Instead of a number of drafts: depends on the device."""

DEFAULT_CPU_DRAFTS = 7
"""Drafts of a sequence in one step on a CPU: with the token before them 8 rows, which cost little
more than one. How many of them a step verifies follows from measured costs."""

LOOK_UPS = ("ngram", "suffix")
"""vLLM's methods without weights."""

WITH_MODEL = ("draft_model", "eagle3", "medusa", "mlp_speculator")
"""vLLM's methods with weights in a folder or repository of their own."""

MTP = "mtp"
"""vLLM's method with layers of the served checkpoint."""

METHODS = (*LOOK_UPS, *WITH_MODEL, MTP)

_LARGEST = (1 << 31) - 1
_SHOWN = 40
"""Characters of an invalid value that an error message repeats."""

_ADAPTS = "the number of drafts always follows the measured durations of steps; leave it out"
_ANY_LENGTH = "matches of any length are used; leave it out"
_EXACT = "drafts are accepted where they equal the sampled token; leave it out"
_ADVICE = {
    "disable_by_batch_size": _ADAPTS,
    "draft_sample_method": "drafts are chosen by the request's own parameters; leave it out",
    "enable_adaptive_verification": _ADAPTS,
    "num_speculative_tokens_per_batch_size": _ADAPTS,
    "prompt_lookup_max": _ANY_LENGTH,
    "prompt_lookup_min": _ANY_LENGTH,
    "rejection_sample_method": _EXACT,
    "suffix_decoding_max_spec_factor": _ANY_LENGTH,
    "suffix_decoding_max_tree_depth": _ANY_LENGTH,
}
"""Remedies for unsupported keys."""


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The part of vLLM's configuration that is supported.

    Attributes:
        method: ``ngram`` looks drafts up in a request's own tokens, ``suffix`` in recent answers,
            too; one of :data:`WITH_MODEL` or :data:`MTP` names what the weights must be. None
            leaves it to the weights.
        num_speculative_tokens: maximum drafts of a sequence in one step, or None for the default.
        model: id or folder of the weights that draft, or None.
        revision: revision of the model, or None for its main branch.
    """

    method: str | None = None
    num_speculative_tokens: int | None = None
    model: str | None = None
    revision: str | None = None

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
        method, model = _method_and_model(given)
        count = given.pop("num_speculative_tokens", None)
        if count is not None and not (type(count) is int and 1 <= count <= _LARGEST):
            raise ValueError(
                f"num_speculative_tokens: {_shown(count)} is not a whole number above 0"
            )
        revision = given.pop("revision", None)
        if revision is not None and (model is None or not isinstance(revision, str)):
            raise ValueError(f"revision {_shown(revision)} is not supported without a model")
        for key in given:
            advice = _ADVICE.get(key)
            raise ValueError(f"{key[:_SHOWN]} is not supported{f': {advice}' if advice else ''}")
        return cls(method, count, model, revision)


def _method_and_model(given: dict[str, Any]) -> tuple[str | None, str | None]:
    """Take both from the values. Raises ValueError."""
    model, method = given.pop("model", None), given.pop("method", None)
    if model in ("ngram", "[ngram]"):  # vLLM's older form
        model, method = None, method or "ngram"
    if isinstance(method, str) and method.endswith(f"_{MTP}"):  # vLLM names some by their family
        method = MTP
    if method is not None and method not in METHODS:
        raise ValueError(f"method {_shown(method)} is not supported; one of: {', '.join(METHODS)}")
    if model is not None and not (isinstance(model, str) and model):
        raise ValueError(f"model {_shown(model)} is not supported: it is no id, and no folder")
    if method in WITH_MODEL and model is None:
        raise ValueError(f"method {method} is not supported without a model")
    if model is not None and method in (*LOOK_UPS, MTP):
        raise ValueError(f"model is not supported with the method {method}, which needs none")
    return method, model


def _shown(value: Any) -> str:
    return repr(value)[:_SHOWN]


def checked(word: str) -> str:
    """The word of ``--speculative-config``, if it is valid. Raises ValueError."""
    SpeculativeConfig.read(word)
    return word


def speculative_model(model: str | None, config: str | None) -> tuple[str, str | None] | None:
    """The weights that ``--speculative-model`` or ``--speculative-config`` name, and the revision.

    Raises:
        ValueError: both do, and name others.
    """
    read = SpeculativeConfig.read(config or "{}")
    if model and read.model and model != read.model:
        raise ValueError(
            f"--speculative-model {model} and model {read.model} contradict each other"
        )
    named = model or read.model
    return None if not named else (named, read.revision)
