"""The limits that hold for all of several engines."""

from __future__ import annotations

from dataclasses import replace

from tests.router.fakes import engine_info
from tgi_cli.engine.common_limits import common_limits


def test_the_smallest_limits_and_the_longest_times() -> None:
    first = engine_info()
    others = [replace(first, max_total_tokens=40, load_seconds=9.0), replace(first, grammar=False)]
    expected = replace(first, max_total_tokens=40, load_seconds=9.0, grammar=False)
    assert common_limits([first, *others]) == expected
    assert common_limits([first]) == first
