"""Names of arguments in transformers' code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Of a cache: transformers from 5.24 on; before, and in models' own code; before, of states."""

LENGTH_NAMES = ("cache_length", "past_key_values_length")
"""Of the number of cached tokens, likewise."""


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function beneath its decorators."""
    return inspect.signature(inspect.unwrap(function)).parameters


def cache_names(function: Callable[..., Any]) -> list[str]:
    """The names under which a function takes a cache."""
    return [name for name in CACHE_NAMES if name in parameters_of(function)]
