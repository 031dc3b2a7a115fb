"""A run from nothing to its end: the server if it is ours to start, the target, the steps."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from tgi_cli.bench import machine
from tgi_cli.bench.events import Event, Run
from tgi_cli.bench.managed_server import own_server
from tgi_cli.bench.options import Options, described, notes_of, plan_of, requests_of
from tgi_cli.bench.run import Runner, both
from tgi_cli.bench.saved_runs import Lines, RunStarted
from tgi_cli.bench.settings import Settings
from tgi_cli.bench.step_driver import Driver
from tgi_cli.bench.targets import Found, find

INTERRUPTED = "interrupted"


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be measured, and where.

    Attributes:
        address: a URL or a shard's socket; empty: a server is started for ``model``.
        model: of the server to start; empty: the bundled one.
        tokenizer_name: an id or a folder; empty: the target's model.
        serve_arguments: more for ``tgi serve``.
        command: the command line, without secrets.
        jsonl: where events are written as they happen.
    """

    options: Options
    settings: Settings
    address: str = ""
    model: str = ""
    tokenizer_name: str = ""
    revision: str = ""
    serve_arguments: tuple[str, ...] = ()
    command: list[str] = []
    jsonl: Path | None = None


class Job:
    """Does what was asked for, once; can be stopped from any thread.

    Args:
        say: gets lines on what is waited for before the first step.

    Attributes:
        url: of the HTTP server, once it is known that there is one.
    """

    def __init__(
        self, request: Measurement, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self._request = request
        self._say = say
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Run] | None = None
        self._runner: Runner | None = None
        self._stopped = ""
        self.url: str | None = None
        self.plan = plan_of(request.options)

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended it."""
        return self._stopped == INTERRUPTED

    def stop(self, reason: str = "stopped") -> None:
        """End it soon: the steps so far are kept; asked again, or before the first step, at once.

        A server that was started is stopped either way.
        """
        loop = self._loop
        if loop is not None and not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it closed meanwhile: all is over
                loop.call_soon_threadsafe(self._stop, reason)

    def _stop(self, reason: str) -> None:
        if self._runner is not None and not self._stopped:
            self._runner.stop(reason)
        elif self._task is not None:
            self._task.cancel()
        self._stopped = self._stopped or reason

    def run(self, on_event: Callable[[Event], None], *, signals: bool = False) -> Run:
        """Do it, on a loop of this thread's own.

        Args:
            signals: SIGINT and SIGTERM stop it (main thread only).

        Raises:
            TgiError: the target cannot be had, or the workload cannot be.
            KeyboardInterrupt: stopped before there was anything to keep.
        """
        try:
            return asyncio.run(self._run(on_event, signals))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    async def _run(self, on_event: Callable[[Event], None], signals: bool) -> Run:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        if signals:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.add_signal_handler(number, self._stop, INTERRUPTED)
        async with self._found() as found:
            return await self._measure(found, on_event)

    @contextlib.asynccontextmanager
    async def _found(self) -> AsyncIterator[Found]:
        request = self._request
        if request.address:
            found = await find(
                request.address,
                request.settings,
                tokenizer_name=request.tokenizer_name,
                revision=request.revision,
            )
            if found.target.kind in ("tgi", "openai"):
                self.url = found.target.address
            yield found
            return
        shard = request.options.load == "batch"
        revision = ("--revision", request.revision) if request.revision else ()
        arguments = (*revision, *request.serve_arguments)
        async with own_server(request.model, arguments, shard=shard, say=self._say) as server:
            self.url = server.url
            address = str(server.socket) if shard else server.url
            yield await find(
                address,
                request.settings,
                tokenizer_name=request.tokenizer_name or request.model,
                revision=request.revision,
                started_here=server.command,
            )

    async def _measure(self, found: Found, on_event: Callable[[Event], None]) -> Run:
        request = self._request
        requests = requests_of(request.options, found.tokenizer)
        driver = Driver(found.target, request.settings, found.tokenizer)
        about = {
            "command": request.command,
            "machine": machine.describe(),
            "workload": described(
                request.options, request.settings, request.tokenizer_name or found.target.model
            ),
            "slo": request.options.slo,
            "notes": [*notes_of(request.options), *found.notes],
        }
        self._runner = Runner(self.plan, found.target, driver, requests, about)
        if request.jsonl is None:
            return await self._runner.run(on_event)
        with contextlib.closing(Lines(request.jsonl)) as lines:
            lines(RunStarted(self._runner.begun))
            return await self._runner.run(both(lines, on_event))
