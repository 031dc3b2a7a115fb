"""Sizes and durations as people read them."""

from __future__ import annotations


def format_size(count: float) -> str:
    """Format the size of a file or a transfer, in powers of 1000.

    >>> format_size(14_500_000_000)
    '14.5 GB'
    """
    return _format_scaled(count, 1000, ("B", "kB", "MB", "GB", "TB"))


def format_memory(count: float) -> str:
    """Format an amount of memory, in powers of 1024.

    >>> format_memory(1536 << 20)
    '1.5 GiB'
    """
    return _format_scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_duration(seconds: float) -> str:
    """Format a duration in hours, minutes and seconds.

    >>> format_duration(70)
    '1m 10s'
    """
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"


def _format_scaled(count: float, base: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if count < base:
            return f"{count:.0f} {unit}" if unit == units[0] else f"{count:.1f} {unit}"
        count /= base
    return f"{count:.1f} {units[-1]}"
