"""Every key and every click, on events that were written down."""

from __future__ import annotations

import pytest

from tests.unit.bench.dashboard.cells import cells, shown
from tests.unit.bench.dashboard.driven import PilotedApp, saved
from tests.unit.bench.dashboard.script import (
    batch_run,
    http_run,
    step_events,
)
from tgi_cli.bench.dashboard.charts import LatencyChart
from tgi_cli.bench.dashboard.keys import KEYS, KeysScreen
from tgi_cli.bench.dashboard.views import VIEWS
from tgi_cli.bench.dashboard.views.requests import Timeline


async def test_tabs_follow_the_run_until_a_key_is_used() -> None:
    driven = PilotedApp()
    app = driven.app
    async with app.run_test(size=(80, 24)) as pilot:
        assert "starting" not in cells(app)[0]  # the title takes all of the line
        run = driven.result
        await driven.tell(*step_events(0, 6, run.steps[0]), *step_events(1, 6, run.steps[1], 4))
        assert app.shown is app.run_state.steps[1]
        screen = shown(app)
        assert "1 / 6" in screen
        assert "4 / 11" in screen
        await pilot.press("left")
        assert app.shown is app.run_state.steps[0]
        await driven.tell(*step_events(2, 6, run.steps[2], 1))
        assert app.shown is app.run_state.steps[0]
        assert "11 / 11" in shown(app)
        await pilot.press("f")
        assert app.shown is app.run_state.steps[2]
        await driven.tell(*step_events(3, 6, run.steps[3], 1))
        assert app.shown is app.run_state.steps[3]
        driven.end()
        await driven.tell()
        assert "6 / 6" in shown(app)


@pytest.mark.parametrize(("key", "places"), [("right", [1, 2, 0]), ("tab", [1, 2, 0])])
async def test_next_and_previous_go_round(key: str, places: list[int]) -> None:
    app = saved(http_run())
    async with app.run_test(size=(80, 24)) as pilot:
        for place in places:
            await pilot.press(key)
            assert app.shown is app.run_state.steps[place]
        await pilot.press("left")
        assert app.shown is app.run_state.steps[2]
        await pilot.press("shift+tab")
        assert app.shown is app.run_state.steps[1]


async def test_plus_and_minus_zoom_the_charts_and_the_histograms() -> None:
    app = saved(batch_run())
    async with app.run_test(size=(80, 24)) as pilot:
        await app.settle()
        await pilot.pause()
        chart = app.query_one("#prefill-chart", LatencyChart)
        whole = (chart._x_min, chart._x_max)
        before = cells(app)
        await pilot.press("plus")
        near = (chart._x_min, chart._x_max)
        assert whole[0] == 0.0 < near[0]
        await pilot.press("equals_sign", "plus")
        assert chart._x_max - chart._x_min < near[1] - near[0]
        await pilot.pause()
        assert cells(app)[3:13] != before[3:13]  # the histograms
        await pilot.press(*["minus"] * 5)
        await pilot.pause()
        assert (chart._x_min, chart._x_max) == whole
        assert app.zoomed == 0
        assert cells(app) == before


async def test_the_wheel_zooms_a_chart_until_a_key_does() -> None:
    app = saved(batch_run())
    async with app.run_test(size=(140, 45)) as pilot:
        await app.settle()
        await pilot.pause()
        chart = app.query_one("#decode-chart", LatencyChart)
        whole = (chart._x_min, chart._x_max)
        chart._zoom(100.0, 100.0, 0.5, True, True)
        await pilot.pause()
        moved = (chart._x_min, chart._x_max)
        assert moved != whole
        await app.settle()
        assert (chart._x_min, chart._x_max) == moved
        await pilot.press("plus", "minus")
        assert (chart._x_min, chart._x_max) == whole


async def test_number_keys_open_the_views() -> None:
    app = saved(http_run(), other=http_run(slower=1.4))
    async with app.run_test(size=(80, 24)) as pilot:
        seen = {}
        for number, name in enumerate(VIEWS, start=1):
            await pilot.press(str(number))
            await app.settle()
            await pilot.pause()
            assert app.current == name
            seen[name] = shown(app)
        assert "Total Progress 3" not in seen["percentiles"]
        assert "p99.9" in seen["percentiles"]
        assert "to first token" in seen["requests"]
        assert "tgi_queue_size" in seen["server"]
        assert "better" in seen["compare"]
        await pilot.press("1")
        await pilot.pause()
        assert "Total Progress" in shown(app)


async def test_tabs_can_be_clicked() -> None:
    app = saved(batch_run())
    async with app.run_test(size=(80, 24)) as pilot:
        await app.settle()
        await pilot.pause()
        line = cells(app)[1]
        await pilot.click(offset=(line.index("Batch: 8") + 1, 1))
        assert app.shown is app.run_state.steps[3]
        assert not app.following
        foot = cells(app)[23]
        await pilot.click(offset=(foot.index("Percentiles"), 23))
        await pilot.pause()
        assert app.current == "percentiles"
        await pilot.click(offset=(0, 23))
        assert app.current == "steps"


async def test_more_tabs_than_columns_are_scrolled() -> None:
    app = saved(batch_run(tuple(range(100, 130)), runs=2))
    async with app.run_test(size=(80, 24)) as pilot:
        await app.settle()
        await pilot.pause()
        line = cells(app)[1]
        assert line.startswith(" Batch: 100")
        assert "Batch: 106" not in line
        assert len(line) <= 80
        await pilot.click(offset=(len(line) - 1, 1))
        assert app.shown is app.run_state.steps[6]
        await pilot.pause()
        assert "Batch: 106" in cells(app)[1]
        await pilot.press(*["left"] * 6)
        await pilot.press("left", "left")  # over the beginning to the last one
        chosen = app.run_state.steps.index(app.shown) if app.shown else -1
        await pilot.pause()
        assert f"Batch: {100 + chosen}" in cells(app)[1]
        await pilot.press(*["left"] * 12)
        await pilot.pause()
        first = cells(app)[1].split()[1]
        assert first.isdigit()
        assert int(first) > 100
        await pilot.click(offset=(3, 1))
        assert app.shown is app.run_state.steps[int(first) - 100]


async def test_the_timeline_scrolls_and_zooms() -> None:
    app = saved(http_run(), first="requests")
    async with app.run_test(size=(80, 24)) as pilot:
        await app.settle()
        await pilot.pause()
        assert " #0 " in cells(app)[3]
        await pilot.press("pagedown")
        await pilot.pause()
        timeline = app.query_one("#timeline", Timeline)
        assert timeline.scroll_offset.y > 5
        assert timeline.window[0] == 0.0
        await pilot.press("plus", "plus")
        low, high = timeline.window
        assert low > 0
        assert high - low == pytest.approx(timeline._end / 4)
        await pilot.press("end")
        await pilot.pause()
        assert "#59" in shown(app)


async def test_dark_and_light() -> None:
    app = saved(batch_run())
    async with app.run_test(size=(80, 24)) as pilot:
        await app.settle()
        await pilot.pause()
        dark = app.export_screenshot()
        await pilot.press("d")
        await app.settle()
        await pilot.pause()
        assert not app.current_theme.dark
        assert app.export_screenshot() != dark
        await pilot.press("d")
        assert app.current_theme.dark


async def test_a_question_mark_lists_the_keys_until_another_key() -> None:
    app = saved(batch_run())
    async with app.run_test(size=(80, 24)) as pilot:
        assert "? keys" in cells(app)[-1]
        await pilot.press("question_mark")
        await pilot.pause()
        listed = shown(app)
        for key, meaning in KEYS:
            assert key in listed
            assert meaning in listed
        assert isinstance(app.screen, KeysScreen)
        await pilot.press("x")
        await pilot.pause()
        assert not isinstance(app.screen, KeysScreen)
