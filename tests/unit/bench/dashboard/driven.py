"""Applications for tests to drive."""

from __future__ import annotations

import threading

from tests.unit.bench.dashboard.script import (
    MODEL,
    batch_run,
)
from tgi_cli.bench.dashboard import ScreenOptions, ScreenTitle
from tgi_cli.bench.dashboard.app import BenchApp
from tgi_cli.bench.events import BenchRun

TITLE = ScreenTitle(MODEL, ("Sequence Length: 10", "Decode Length: 8"))


class PilotedApp:
    """A run that tells what it is told to, and ends when it is told to."""

    def __init__(
        self, result: BenchRun | None = None, stops: bool = True, **options: object
    ) -> None:
        self.result = result or batch_run()
        self.ended = threading.Event()
        self.stopped = 0
        self.stops = stops
        self.failure: BaseException | None = None
        self.app = BenchApp(
            ScreenOptions(title=TITLE, start=self.start, stop=self.stop, **options)  # type: ignore[arg-type]
        )

    def start(self, emit: object) -> BenchRun:
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


def saved(run: BenchRun, **settings: object) -> BenchApp:
    return BenchApp(ScreenOptions(title=ScreenTitle.of(run), run=run, **settings))  # type: ignore[arg-type]
