"""Sizes and durations as people read them."""

from __future__ import annotations

import pytest

from tgi_cli.process.units import format_duration, format_memory, format_size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1_500_000, "1.5 MB"),
        (14_500_000_000, "14.5 GB"),
        (2e16, "20000.0 TB"),
    ],
)
def test_sizes_are_in_powers_of_1000(count: float, text: str) -> None:
    assert format_size(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(1023, "1023 B"), (1 << 10, "1.0 KiB"), (1536 << 20, "1.5 GiB")]
)
def test_memory_is_in_powers_of_1024(count: int, text: str) -> None:
    assert format_memory(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0m 00s"), (70, "1m 10s"), (3700, "1h 01m")])
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
