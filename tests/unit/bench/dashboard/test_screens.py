"""Every view as text, cell by cell: a layout that breaks is seen here.

``python -m tests.tools.bench_screens --texts`` writes the texts anew; look at what has changed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.bench.dashboard.views import SIZES, drawn_views

TEXTS = Path(__file__).parent / "screens"


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_views_match_the_saved_screens(size: tuple[int, int]) -> None:
    width, height = size
    async for name, lines in drawn_views(size):
        assert len(lines) == height
        assert max(map(len, lines)) <= width
        expected = (TEXTS / f"{name}-{width}x{height}.txt").read_text().split("\n")
        assert lines == expected[:-1], f"{name} at {width}x{height}"
