"""The application: keys, tabs, message line, and when the views are painted."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from dataclasses import replace
from typing import ClassVar

from rich.text import Text
from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widgets import ContentSwitcher, Tab

from tgi_cli.bench.dashboard import widgets
from tgi_cli.bench.dashboard.keys import KeysScreen
from tgi_cli.bench.dashboard.metrics import MetricsCache
from tgi_cli.bench.dashboard.poller import INTERVAL, ServerPoller
from tgi_cli.bench.dashboard.run_state import EventQueue, RunState, StepState
from tgi_cli.bench.dashboard.views import VIEWS, ScreenOptions, ViewName, ViewState
from tgi_cli.bench.dashboard.views.compare import CompareView
from tgi_cli.bench.dashboard.views.percentiles import PercentilesView
from tgi_cli.bench.dashboard.views.requests import MAX_ZOOM, RequestsView
from tgi_cli.bench.dashboard.views.server import ServerView
from tgi_cli.bench.dashboard.views.steps import StepsView
from tgi_cli.bench.dashboard.widgets import DrawnText, TabRow
from tgi_cli.bench.events import BenchRun
from tgi_cli.errors import ConfigError, TgiError

TICK = 0.1
"""Seconds between checks for events; the screen is painted at most that often."""
TALL = 34
"""Lines from which frames and names of axes are shown."""
PATIENCE = 10.0
"""Seconds for a run to end when the process is terminated."""


class BenchApp(App[None]):
    """The dashboard. Use ``run_screen``, ``view``, ``watch`` and ``picture`` of the package."""

    CSS_PATH = "style.tcss"
    TITLE = "tgi bench"
    ENABLE_COMMAND_PALETTE = False
    ALLOW_SELECT = False
    AUTO_FOCUS = None
    # Textual does not declare it as a class variable.
    VERTICAL_BREAKPOINTS = [(0, "-low"), (20, "-short"), (TALL, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right,tab", "step(1)", "Next step", priority=True),
        Binding("left,shift+tab", "step(-1)", "Previous step", priority=True),
        Binding("plus,equals_sign", "zoom(1)", "Zoom in"),
        Binding("minus", "zoom(-1)", "Zoom out"),
        Binding("f", "follow", "Follow the running step"),
        Binding("d", "background", "Dark or light"),
        Binding("question_mark,f1", "keys", "Keys"),
        *(
            Binding(str(number), f"open('{name}')", name.capitalize())
            for number, name in enumerate(VIEWS, start=1)
        ),
        Binding("q,ctrl+c,ctrl+q", "leave", "Quit", priority=True),
    ]

    def __init__(self, options: ScreenOptions, poller: ServerPoller | None = None) -> None:
        super().__init__()
        self.animation_level = "none"
        run = options.run
        self.heading = options.title
        self.run_state = RunState() if run is None else RunState.of(run)
        self.metrics = MetricsCache(options.slo or (run.slo if run is not None else None))
        self.feed = EventQueue()
        self.shown = self.run_state.steps[options.step] if self.run_state.steps else None
        self.following = run is None
        self.leaving = False
        self.signalled = 0
        self.zoomed = 0
        self.current = options.first
        self.svg_failure = ""
        self._options = options
        self._poller = poller
        self._painted = (-1, -1)
        self._computing = False
        self._deadline = float("inf")

    # Opening and closing.

    def show(self) -> BenchRun | None:
        """Show the screen until the user quits; see ``run_screen``."""
        streams = (sys.__stdin__, sys.__stderr__)
        if not all(stream is not None and stream.isatty() for stream in streams):
            raise ConfigError("the dashboard needs a terminal", "use --ui plain")
        self.run()
        if self.signalled:
            raise SystemExit(128 + self.signalled)
        if self.return_code:
            self._end_run()
            if self.feed.result is None:
                raise TgiError("the dashboard failed; its traceback is above", "use --ui plain")
        if self.feed.failure is not None:
            raise self.feed.failure
        if self.svg_failure:
            raise ConfigError(f"{self._options.svg} cannot be written: {self.svg_failure}")
        return self.feed.result

    def picture(self, width: int, height: int) -> str:
        """The screen of a saved run as SVG, without a terminal."""

        async def shot() -> str:
            async with self.run_test(size=(width, height)) as pilot:
                await self.settle()
                await pilot.pause()
                return self.export_screenshot(simplify=True)

        return asyncio.run(shot())

    async def settle(self) -> None:
        """Process all events, compute all missing metrics, and paint."""
        self.tick()
        await self.workers.wait_for_complete()
        while self.metrics.missing(self.run_state, self.shown, self.current == "percentiles"):
            await self.metrics.update(self.run_state, self.shown, self.current == "percentiles")
        self.paint()
        await self.workers.wait_for_complete()

    def compose(self) -> ComposeResult:
        """Implement Textual's hook."""
        yield DrawnText(id="head")
        yield TabRow(id="tabs")
        with ContentSwitcher(id="views", initial=self.current):
            yield StepsView(id="steps")
            yield PercentilesView(id="percentiles")
            yield RequestsView(id="requests")
            yield ServerView(id="server")
            yield CompareView(id="compare")
        yield DrawnText(id="message")
        with Horizontal(id="foot"):
            yield TabRow(id="view-tabs")
            yield DrawnText(id="keys")

    async def on_mount(self) -> None:
        """Start the run and the timers."""
        self.query_one("#keys", DrawnText).show(lambda width, height: widgets.key_help())
        self._catch_signals()
        if self._options.start is not None:
            self.feed.follow(self._options.start)
        self.set_interval(TICK, self.tick)
        self.set_interval(INTERVAL, self._ask)
        await self.action_open(self.current)

    async def on_unmount(self) -> None:
        """Implement Textual's hook."""
        if self._poller is not None:
            await self._poller.close()

    def on_resize(self, event: events.Resize) -> None:
        """Adapt to the new size."""
        for view in self.query(StepsView):
            view.set_tall(event.size.height >= TALL)
        self.call_after_refresh(self.paint)

    # Timers.

    def tick(self) -> None:
        """Process new events, and paint if there are any."""
        over = self.feed.over  # read first: all earlier events are drained below
        for event in self.feed.drain():
            self.run_state.apply(event)
        if over and self.run_state.run is None and self.run_state.fatal is None:
            self._note_failure()
        run = self.run_state.run
        model = run.target.model if run is not None else self._options.model()
        if model:
            self.heading = replace(self.heading, model=model)
        if self.following and self.run_state.running is not None:
            self.shown = self.run_state.running
        elif self.shown not in self.run_state.steps:
            self.shown = self.run_state.steps[0] if self.run_state.steps else None
        if self.leaving and (over or time.monotonic() > self._deadline):
            self._close()
            return
        history = self._poller.history.version if self._poller is not None else 0
        if (self.run_state.version, history) != self._painted:
            self._painted = (self.run_state.version, history)
            self.paint()
        tables = self.current == "percentiles"
        if not self._computing and self.metrics.due(self.run_state, self.shown, tables):
            self._computing = True
            self.run_worker(self._compute(tables))

    async def _compute(self, tables: bool) -> None:
        try:
            await self.metrics.update(self.run_state, self.shown, tables)
        finally:
            self._computing = False
        self.paint()

    async def _ask(self) -> None:
        """Scrape the server: during a run from its start, else once its view is open."""
        run = self.run_state.run
        if self._options.url is None or (run is not None and run.target.started_here):
            return  # a server that the run started ends with it
        if self._poller is None and (self._unfinished or self.current == "server"):
            url = self._options.url if isinstance(self._options.url, str) else self._options.url()
            self._poller = ServerPoller(url, self._options.headers) if url else None
        if self._poller is not None:
            self.run_worker(self._sample(self._poller), group="server", exclusive=True)

    async def _sample(self, poller: ServerPoller) -> None:
        await poller.ask()
        if not poller.history.error:
            self.run_state.count_drafts(poller.history.samples[-1].accepted_tokens)

    def _note_failure(self) -> None:
        failure = self.feed.failure
        if isinstance(failure, TgiError):
            self.run_state.give_up(failure.cause, failure.remedy)
        elif failure is not None:
            self.run_state.give_up(f"{type(failure).__name__}: {failure}")

    # Painting.

    @property
    def view_state(self) -> ViewState:
        """The state that views are painted from."""
        return ViewState(
            run_state=self.run_state,
            metrics=self.metrics,
            shown=self.shown,
            zoom=self.zoomed,
            dark=self.current_theme.dark,
            history=self._poller.history if self._poller is not None else None,
            other=self._options.other,
        )

    def paint(self) -> None:
        """Paint the frame and the open view."""
        if not (self.is_running and self.screen_stack and self.query("#head")):
            return  # before the screen is mounted, or after it closed
        state = self.view_state
        status = widgets.status_text(state, self.leaving, self._options.start is not None)
        self.query_one("#head", DrawnText).show(
            lambda width, height: widgets.head_line(self.heading, status, width),
            (self.heading, status),
        )
        labels = widgets.step_labels(state)
        index = self.run_state.steps.index(self.shown) if self.shown in self.run_state.steps else -1
        self.query_one("#tabs", TabRow).show(labels, index)
        names = [Text(f"{n} {name.capitalize()}") for n, name in enumerate(VIEWS, start=1)]
        self.query_one("#view-tabs", TabRow).show(names, VIEWS.index(self.current))
        message = widgets.message_line(state, self.leaving)
        drawing = self.query_one("#message", DrawnText)
        drawing.display = bool(message.plain)
        drawing.show(lambda width, height: widgets.truncated(message, width), message.plain)
        view = self.query_one(f"#views > #{self.current}")
        assert isinstance(
            view, StepsView | PercentilesView | RequestsView | ServerView | CompareView
        )
        view.paint(state)

    # Keys and clicks.

    def action_step(self, by: int) -> None:
        """Show the next or the previous step, and stop following the running one."""
        steps = self.run_state.steps
        if steps:
            here = steps.index(self.shown) if self.shown in steps else 0
            self._choose(steps[(here + by) % len(steps)])

    @on(Tab.Clicked)
    async def choose_tab(self, event: Tab.Clicked) -> None:
        """A tab of a step or of a view was clicked."""
        row = self.query_one("#view-tabs")
        if event.tab.parent is row:
            await self.action_open(VIEWS[row.children.index(event.tab)])
        else:
            index = self.query_one("#tabs").children.index(event.tab)
            self._choose(self.run_state.steps[index])

    def _choose(self, step: StepState) -> None:
        self.following = False
        self.shown = step
        self.paint()

    def action_follow(self) -> None:
        """Follow the running step again."""
        self.following = True
        self.shown = self.run_state.running or self.shown
        self.paint()

    def action_zoom(self, by: int) -> None:
        """Zoom charts, histograms and the timeline."""
        self.zoomed = min(max(self.zoomed + by, 0), MAX_ZOOM)
        self.query_one(StepsView).release()
        self.paint()

    def action_background(self) -> None:
        """Toggle the dark background."""
        self.theme = "textual-light" if self.current_theme.dark else "textual-dark"
        self.paint()

    def action_keys(self) -> None:
        """List the keys."""
        if not isinstance(self.screen, KeysScreen):
            self.push_screen(KeysScreen())

    async def action_open(self, name: ViewName) -> None:
        """Open a view."""
        self.current = name
        switcher = self.query_one("#views", ContentSwitcher)
        switcher.current = name
        view = self.query_one(f"#views > #{name}")
        target = next((w for w in (view, *view.query("*")) if w.focusable), None)
        self.screen.set_focus(target)
        if name == "server":
            await self._ask()
        self.call_after_refresh(self.paint)

    @property
    def _unfinished(self) -> bool:
        """Whether a run goes on."""
        return self._options.start is not None and not self.feed.over

    def action_leave(self) -> None:
        """Quit: stop a running benchmark and wait for it; the second time, leave at once."""
        if not self._unfinished or self.leaving or self._options.stop is None:
            self._close()
            return
        self.leaving = True
        self._options.stop()
        self.paint()

    def _close(self) -> None:
        if self._options.svg is not None:
            try:
                picture = self.export_screenshot(simplify=True)
                self._options.svg.write_text(picture, encoding="utf-8")
            except OSError as error:
                self.svg_failure = error.strerror or str(error)
        self.exit()

    def _end_run(self) -> None:
        """Stop a run that is no longer shown."""
        if self._unfinished and self._options.stop is not None:
            self._options.stop()
            self.feed.wait(PATIENCE)

    def _catch_signals(self) -> None:
        """Restore the terminal before a signal ends the process."""
        if self.is_headless:
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._terminate, number)

    def _terminate(self, number: int) -> None:
        self.signalled = number
        self._deadline = time.monotonic() + PATIENCE
        if not self.leaving:
            self.action_leave()
