"""The server's metrics over time."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.bench.dashboard.cells import cells, shown
from tests.unit.bench.dashboard.driven import PilotedApp
from tests.unit.bench.dashboard.script import http_run
from tests.unit.bench.dashboard.views import SIZES, server
from tgi_cli.bench.dashboard import app as application
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
    assert ("Drafts accepted: 75.0 %, context 90, weights 30" in screen) == drafts


async def test_a_run_is_sampled_from_its_start_until_its_server_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = server()
    monkeypatch.setattr(application, "ServerPoller", lambda url, headers: asked)
    run = http_run()
    own = msgspec.structs.replace(run.target, started_here=["tgi", "serve"])
    driven = PilotedApp(msgspec.structs.replace(run, target=own), url=lambda: run.target.address)
    app = driven.app
    async with app.run_test(size=(80, 24)) as pilot:
        assert app.current == "steps"
        for _ in range(5):
            await app._ask()
            await app.workers.wait_for_complete()
        driven.end()
        await driven.tell()
        taken = len(asked.history.samples)
        assert taken >= 5
        asked.history.error = "connection refused"  # as the server ends with its run
        await pilot.press("4")
        await app._ask()
        await app.settle()
        await pilot.pause()
        assert len(asked.history.samples) == taken
        screen = shown(app)
        assert "of the run" in screen
        assert all(f"{title}: " in screen for title in TITLES)
        assert "refused" not in screen
        assert "No server" not in screen
