"""What may happen while it is open: failures, resizes, floods, and ways to leave it."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.bench.dashboard.cells import cells, shown
from tests.unit.bench.dashboard.driven import PilotedApp, saved
from tests.unit.bench.dashboard.script import (
    MODEL,
    batch_run,
    batch_step,
    http_run,
    http_step,
    step_events,
)
from tgi_cli.bench.dashboard import ScreenOptions, ScreenTitle
from tgi_cli.bench.dashboard.app import BenchApp
from tgi_cli.bench.dashboard.formatting import gauge_styles
from tgi_cli.bench.dashboard.widgets import DrawnText, TabRow
from tgi_cli.bench.events import StepFailed
from tgi_cli.errors import ShardError


async def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    import re

    monkeypatch.setenv("NO_COLOR", "1")
    app = saved(http_run())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("left")
        await app.settle()
        await pilot.pause()
        svg = app.export_screenshot()
        body = svg[svg.index("<g class=") :]
        styles = svg[svg.index("<style>") : svg.index("</style>")]
        colours = re.findall(r"-r\d+ { fill: (#[0-9a-f]{6})", styles) + re.findall(
            r'<rect fill="(#[0-9a-f]{6})"', body
        )
        seen = set(colours) - {"#c5c8c6"}  # Rich's own, of the ends of lines
        assert seen
        assert all(code[1:3] == code[3:5] == code[5:7] for code in seen), seen
        assert "error" in shown(app) or "!" in cells(app)[1]  # what is red says so too


async def test_quitting_stops_the_run_and_gives_it_back() -> None:
    driven = PilotedApp()
    async with driven.app.run_test(size=(80, 24)) as pilot:
        await driven.tell(*step_events(0, 6, driven.result.steps[0], 3))
        await pilot.press("q")
        assert driven.stopped == 1
        driven.app.tick()
        await pilot.pause()
    assert driven.app.feed.result is driven.result


async def test_quitting_twice_does_not_wait() -> None:
    driven = PilotedApp(stops=False)
    async with driven.app.run_test(size=(80, 24)) as pilot:
        await pilot.press("ctrl+c")
        await pilot.pause()
        assert "q again leaves at once" in shown(driven.app)
        assert driven.app.is_running
        await pilot.press("q")
        await pilot.pause()
        assert driven.stopped == 1
    assert driven.app.feed.result is None
    driven.end()


async def test_a_run_that_is_over_stays_open_to_be_looked_at() -> None:
    driven = PilotedApp()
    async with driven.app.run_test(size=(140, 45)) as pilot:
        driven.end()
        await driven.tell()
        await pilot.pause()
        assert cells(driven.app)[0].endswith("finished")
        await pilot.press("right", "2", "3", "1", "q")
        assert driven.stopped == 0


async def test_a_fatal_failure_is_told_and_kept_for_the_exit_code() -> None:
    driven = PilotedApp()
    driven.failure = ShardError("the model server died", "see its log")
    async with driven.app.run_test(size=(80, 24)) as pilot:
        await driven.tell(*step_events(0, 6, driven.result.steps[0], 3))
        driven.end()
        await driven.tell()
        await pilot.pause()
        assert "failed: the model server died (see its log)" in shown(driven.app)
        await pilot.press("right", "2", "q")
    assert driven.app.feed.failure is driven.failure


async def test_a_defect_of_the_run_is_told_too() -> None:
    driven = PilotedApp()
    driven.failure = ZeroDivisionError("division by zero")
    async with driven.app.run_test(size=(80, 24)) as pilot:
        driven.end()
        await driven.tell()
        await pilot.pause()
        assert "ZeroDivisionError: division by zero" in shown(driven.app)


async def test_errors_are_red_and_the_sweep_goes_on() -> None:
    driven = PilotedApp(http_run())
    app = driven.app
    async with app.run_test(size=(80, 24)) as pilot:
        await driven.tell(
            *step_events(0, 3, http_step(16), 20), StepFailed(0, "the server hung up")
        )
        await pilot.pause()
        assert "5 errors, the newest: Clients: 16: the server hung up" in shown(app)
        assert "Clients: 16!" in cells(app)[1]
        bad, _ = gauge_styles(bad=True, dark=True)
        gauge = app.query_one("#step", DrawnText).render()
        assert bad in [span.style for span in gauge.spans]
        await driven.tell(*step_events(1, 3, http_step(4), 10))
        await pilot.pause()
        assert app.shown is app.run_state.steps[1]
        assert "10 / 60" in shown(app)


async def test_every_request_failing_and_steps_without_results() -> None:
    refused = [request for request in http_step(16, 200).requests if request.error]
    nothing = batch_step(4, runs=0)
    driven = PilotedApp()
    async with driven.app.run_test(size=(80, 24)) as pilot:
        failed = type(nothing)(step=http_step(16).step, began=0.0, duration=1.0, requests=refused)
        await driven.tell(*step_events(0, 2, failed), *step_events(1, 2, nothing, 0))
        for key in "12345":
            await pilot.press(key, "right")
            await driven.app.settle()
            await pilot.pause()
        assert driven.app.is_running


async def test_names_in_any_script() -> None:
    run = batch_run()
    named = msgspec.structs.replace(run.target, model="組織/模型-🚀-[red]x[/]")
    run = msgspec.structs.replace(run, target=named)
    app = BenchApp(ScreenOptions(title=ScreenTitle(named.model, ("длина: 10",)), run=run))
    async with app.run_test(size=(80, 24)) as pilot:
        await app.settle()
        await pilot.pause()
        assert "組織/模型-🚀-[red]x[/] | длина: 10" in cells(app)[0]


async def test_the_model_is_named_once_it_is_known() -> None:
    driven = PilotedApp()
    driven.app.heading = ScreenTitle("http://127.0.0.1:3000")
    async with driven.app.run_test(size=(80, 24)) as pilot:
        await driven.tell(*step_events(0, 6, driven.result.steps[0], 3))
        await pilot.pause()
        assert cells(driven.app)[0].startswith("http://127.0.0.1:3000")
        driven.end()
        await driven.tell()
        await pilot.pause()
        assert cells(driven.app)[0].startswith(MODEL)


async def test_resizes_while_it_runs() -> None:
    driven = PilotedApp()
    async with driven.app.run_test(size=(80, 24)) as pilot:
        await driven.tell(*step_events(0, 2, http_step(4), 30))
        sizes = [(20, 6), (1, 1), (40, 12), (80, 21), (150, 50), (60, 24)]
        for number, size in enumerate(sizes):
            for key in ("1", "12345"[number % 5]):
                await pilot.press(key)
                await pilot.resize_terminal(*size)
                upto = 5 + number
                await driven.tell(*step_events(1, 2, http_step(16), upto))
        await pilot.resize_terminal(80, 24)
        await pilot.press("1")
        await driven.app.settle()
        await pilot.pause()
        screen = cells(driven.app)
        assert len(screen) == 24
        assert "1 Steps" in screen[23]


async def test_thousands_of_requests_are_painted_seldom() -> None:
    driven = PilotedApp()
    app = driven.app
    async with app.run_test(size=(80, 24)) as pilot:
        record = http_step(16, requests=5000)
        painted = 0
        paint = app.paint

        def counting() -> None:
            nonlocal painted
            painted += 1
            paint()

        app.paint = counting  # type: ignore[method-assign]
        for event in step_events(0, 1, record, 5000):
            app.feed.put(event)
        app.tick()
        await pilot.pause()
        assert painted <= 5
        assert len(app.run_state.steps[0].requests) == 5000
        await app.settle()
        table = app.metrics.panels(app.run_state.steps[0])
        assert table is not None
        assert 0 < len(table.prefill.values) <= 4000


async def test_the_last_screen_is_saved_as_svg(tmp_path) -> None:
    target = tmp_path / "screen.svg"
    app = saved(batch_run(), svg=target)
    async with app.run_test(size=(80, 24)) as pilot:
        await app.settle()
        await pilot.press("q")
    assert "Total" in target.read_text()
    app = saved(batch_run(), svg=tmp_path / "none" / "screen.svg")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("q")
    assert app.svg_failure


async def test_the_view_tabs_fit_in_eighty_columns() -> None:
    app = saved(batch_run())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        foot = cells(app)[23]
        assert "5 Compare" in foot
        assert foot.endswith("q quit")
        assert app.query_one("#view-tabs", TabRow).size.width >= 57


def test_a_failed_dashboard_still_returns_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    driven = PilotedApp()

    def run() -> None:
        driven.app.feed.follow(driven.start)
        driven.app.exit(return_code=1)

    monkeypatch.setattr("sys.__stdin__", Terminal())
    monkeypatch.setattr("sys.__stderr__", Terminal())
    monkeypatch.setattr(driven.app, "run", run)
    assert driven.app.show() is driven.result
    assert driven.stopped == 1
