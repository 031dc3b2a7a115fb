"""Names of arguments in the code of transformers' versions and of models' own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

from tgi_cli.models.hf.arguments import cache_names


def newer(ids: Any, cache: Any = None) -> None: ...


def older(ids: Any, past_key_values: Any = None, cache_position: Any = None) -> None: ...


def state_space(ids: Any, cache_params: Any = None) -> None: ...


def without(ids: Any, **others: Any) -> None: ...


def renamed(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def accepts_older_names(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return accepts_older_names


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (newer, ["cache"]),
        (older, ["past_key_values"]),
        (state_space, ["cache_params"]),
        (without, []),
        (renamed(newer), ["cache"]),
    ],
)
def test_names_of_a_cache(function: Callable[..., Any], names: list[str]) -> None:
    assert cache_names(function) == names
