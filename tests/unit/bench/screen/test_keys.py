"""Every key and every click, on events that were written down."""

from __future__ import annotations

import threading

import msgspec
import pytest

from tests.unit.bench.screen.cells import cells, shown
from tests.unit.bench.screen.script import (
    MODEL,
    batch_run,
    batch_step,
    http_run,
    http_step,
    step_events,
)
from tgi_cli.bench.records import Run, StepFailed
from tgi_cli.bench.screen import VIEWS, Title
from tgi_cli.bench.screen.app import BenchApp
from tgi_cli.bench.screen.charts import Chart
from tgi_cli.bench.screen.drawing import TabRow
from tgi_cli.bench.screen.views.requests import Timeline
from tgi_cli.errors import ShardError

TITLE = Title(MODEL, ("Sequence Length: 10", "Decode Length: 8"))


class Driven:
    """A run that tells what it is told to, and ends when it is told to."""

    def __init__(self, result: Run | None = None, stops: bool = True) -> None:
        self.result = result or batch_run()
        self.ended = threading.Event()
        self.stopped = 0
        self.stops = stops
        self.failure: BaseException | None = None
        self.app = BenchApp(title=TITLE, start=self.start, stop=self.stop)

    def start(self, emit: object) -> Run:
        assert self.ended.wait(20)
        if self.failure is not None:
            raise self.failure
        return self.result

    def stop(self) -> None:
        self.stopped += 1
        if self.stops:
            self.end()

    def end(self) -> None:
        self.ended.set()
        self.app.feed.wait(20)

    async def tell(self, *happened: object) -> None:
        for event in happened:
            self.app.feed.put(event)  # type: ignore[arg-type]
        await self.app.settle()


def saved(run: Run, **settings: object) -> BenchApp:
    return BenchApp(title=Title.of(run), run=run, **settings)  # type: ignore[arg-type]


async def test_tabs_follow_the_run_until_a_key_is_used() -> None:
    driven = Driven()
    app = driven.app
    async with app.run_test(size=(80, 24)) as pilot:
        assert "starting" not in cells(app)[0]  # the title takes all of the line
        run = driven.result
        await driven.tell(*step_events(0, 6, run.steps[0]), *step_events(1, 6, run.steps[1], 4))
        assert app.shown is app.board.steps[1]
        screen = shown(app)
        assert "1 / 6" in screen
        assert "4 / 11" in screen
        await pilot.press("left")
        assert app.shown is app.board.steps[0]
        await driven.tell(*step_events(2, 6, run.steps[2], 1))
        assert app.shown is app.board.steps[0]
        assert "11 / 11" in shown(app)
        await pilot.press("f")
        assert app.shown is app.board.steps[2]
        await driven.tell(*step_events(3, 6, run.steps[3], 1))
        assert app.shown is app.board.steps[3]
        driven.end()
        await driven.tell()
        assert "6 / 6" in shown(app)


@pytest.mark.parametrize(("key", "places"), [("right", [1, 2, 0]), ("tab", [1, 2, 0])])
async def test_next_and_previous_go_round(key: str, places: list[int]) -> None:
    app = saved(http_run())
    async with app.run_test(size=(80, 24)) as pilot:
        for place in places:
            await pilot.press(key)
            assert app.shown is app.board.steps[place]
        await pilot.press("left")
        assert app.shown is app.board.steps[2]
        await pilot.press("shift+tab")
        assert app.shown is app.board.steps[1]


async def test_plus_and_minus_zoom_the_charts_and_the_histograms() -> None:
    app = saved(batch_run())
    async with app.run_test(size=(80, 24)) as pilot:
        await app.settle()
        await pilot.pause()
        chart = app.query_one("#prefill-chart", Chart)
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
        chart = app.query_one("#decode-chart", Chart)
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
        assert await pilot.click("#tabs", offset=(line.index("Batch: 8") + 1, 0))
        assert app.shown is app.board.steps[3]
        assert not app.following
        foot = cells(app)[23]
        assert await pilot.click("#view-tabs", offset=(foot.index("Percentiles"), 0))
        await pilot.pause()
        assert app.current == "percentiles"
        assert await pilot.click("#view-tabs", offset=(0, 0))
        assert app.current == "steps"


async def test_more_tabs_than_columns_are_scrolled() -> None:
    app = saved(batch_run(tuple(range(100, 130)), runs=2))
    async with app.run_test(size=(80, 24)) as pilot:
        await app.settle()
        await pilot.pause()
        line = cells(app)[1]
        assert line.startswith(" Batch: 100")
        assert line.endswith("›")
        assert len(line) <= 80
        await pilot.click("#tabs", offset=(len(line) - 1, 0))
        await pilot.press("left", "left")  # over the beginning to the last one
        chosen = app.board.steps.index(app.shown) if app.shown else -1
        await pilot.pause()
        assert f"Batch: {100 + chosen}" in cells(app)[1]
        await pilot.press(*["left"] * 12)
        await pilot.pause()
        assert cells(app)[1].startswith("‹")
        before = app.shown
        await pilot.click("#tabs", offset=(0, 0))
        assert app.shown is not before


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
    driven = Driven()
    async with driven.app.run_test(size=(80, 24)) as pilot:
        await driven.tell(*step_events(0, 6, driven.result.steps[0], 3))
        await pilot.press("q")
        assert driven.stopped == 1
        driven.app.tick()
        await pilot.pause()
    assert driven.app.feed.result is driven.result


async def test_quitting_twice_does_not_wait() -> None:
    driven = Driven(stops=False)
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
    driven = Driven()
    async with driven.app.run_test(size=(140, 45)) as pilot:
        driven.end()
        await driven.tell()
        await pilot.pause()
        assert cells(driven.app)[0].endswith("over")
        await pilot.press("right", "2", "3", "1", "q")
        assert driven.stopped == 0


async def test_a_fatal_failure_is_told_and_kept_for_the_exit_code() -> None:
    driven = Driven()
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
    driven = Driven()
    driven.failure = ZeroDivisionError("division by zero")
    async with driven.app.run_test(size=(80, 24)) as pilot:
        driven.end()
        await driven.tell()
        await pilot.pause()
        assert "ZeroDivisionError: division by zero" in shown(driven.app)


async def test_errors_are_red_and_the_sweep_goes_on() -> None:
    driven = Driven(http_run())
    app = driven.app
    async with app.run_test(size=(80, 24)) as pilot:
        await driven.tell(
            *step_events(0, 3, http_step(16), 20), StepFailed(0, "the server hung up")
        )
        await pilot.pause()
        assert "5 errors, the newest: Clients: 16: the server hung up" in shown(app)
        assert "Clients: 16!" in cells(app)[1]
        gauge = app.query_one("#step")
        bad = gauge.get_component_styles("gauge--bad").background.hex
        assert bad.lower() in app.export_screenshot().lower()
        await driven.tell(*step_events(1, 3, http_step(4), 10))
        await pilot.pause()
        assert app.shown is app.board.steps[1]
        assert "10 / 60" in shown(app)


async def test_every_request_failing_and_steps_without_results() -> None:
    refused = [request for request in http_step(16, 200).requests if request.error]
    nothing = batch_step(4, runs=0)
    driven = Driven()
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
    app = BenchApp(title=Title(named.model, ("длина: 10",)), run=run)
    async with app.run_test(size=(80, 24)) as pilot:
        await app.settle()
        await pilot.pause()
        assert "組織/模型-🚀-[red]x[/] | длина: 10" in cells(app)[0]


async def test_the_model_is_named_once_it_is_known() -> None:
    driven = Driven()
    driven.app.heading = Title("http://127.0.0.1:3000")
    async with driven.app.run_test(size=(80, 24)) as pilot:
        await driven.tell(*step_events(0, 6, driven.result.steps[0], 3))
        await pilot.pause()
        assert cells(driven.app)[0].startswith("http://127.0.0.1:3000")
        driven.end()
        await driven.tell()
        await pilot.pause()
        assert cells(driven.app)[0].startswith(MODEL)


async def test_resizes_while_it_runs() -> None:
    driven = Driven()
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
    driven = Driven()
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
        assert len(app.board.steps[0].requests) == 5000
        await app.settle()
        table = app.figures.panels(app.board.steps[0])
        assert table is not None
        assert 0 < len(table.prefill.values) <= 4000


async def test_the_last_screen_is_left_as_a_picture(tmp_path) -> None:
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


def test_a_dashboard_that_broke_still_gives_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    driven = Driven()

    def run() -> None:
        driven.app.feed.follow(driven.start)
        driven.app.exit(return_code=1)

    monkeypatch.setattr("sys.__stdin__", Terminal())
    monkeypatch.setattr("sys.__stderr__", Terminal())
    monkeypatch.setattr(driven.app, "run", run)
    assert driven.app.show() is driven.result
    assert driven.stopped == 1
