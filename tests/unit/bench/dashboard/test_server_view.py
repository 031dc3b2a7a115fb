"""The server's metrics over time."""

from __future__ import annotations

import pytest

from tests.unit.bench.dashboard.cells import cells
from tests.unit.bench.dashboard.script import http_run
from tests.unit.bench.dashboard.views import SIZES, server
from tgi_cli.bench.dashboard.app import BenchApp
from tgi_cli.bench.dashboard.run_state import ScreenTitle
from tgi_cli.bench.dashboard.views import ScreenOptions

TITLES = ("Queue", "Batch", "KV cache", "Prefix hits", "Output", "Prompts")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("drafts", [False, True])
async def test_accepted_drafts_are_shown_of_a_server_that_has_any(
    size: tuple[int, int], drafts: bool
) -> None:
    asked = server(drafts)
    for _ in range(75):
        await asked.ask()
    run = http_run()
    app = BenchApp(ScreenOptions(title=ScreenTitle.of(run), run=run), asked)
    async with app.run_test(size=size) as pilot:
        await app.action_open("server")
        await pilot.pause()
        await app.settle()
        await pilot.pause()
        lines = cells(app)
    assert len(lines) == size[1]
    assert max(map(len, lines)) <= size[0]
    screen = "\n".join(lines)
    assert all(f"{title}: " in screen for title in TITLES)
    assert ("Drafts accepted: 75.0 %" in screen) == drafts
