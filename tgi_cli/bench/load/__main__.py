"""One load generator: ``python -m tgi_cli.bench.load``; see :mod:`tgi_cli.bench.load.frames`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import sys
import threading
from typing import BinaryIO, cast

from tgi_cli.bench.load import frames
from tgi_cli.bench.load.client_lag import LagMonitor
from tgi_cli.bench.load.generator import HttpLoadGenerator, LoadGenerator
from tgi_cli.errors import ExitCode, TgiError

_COLLECT_AFTER = 50_000
_FLUSH_SECONDS = 30.0


class _FrameWriter(asyncio.BaseProtocol):
    """Writes frames to the parent process, without waiting for it."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's are no subclasses

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def report(self, message: frames.FromGenerator) -> None:
        """Write a frame."""
        if self._transport is not None:
            self._transport.write(frames.pack(message))

    async def flush(self) -> None:
        """Close the pipe when all is written, or after a while."""
        if self._transport is not None:
            self._transport.close()
            await asyncio.wait({self.closed}, timeout=_FLUSH_SECONDS)


def main() -> int:
    """Run the job and return the exit status."""
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no frame
    # Not sys.stdin: to close that, Python waits a second for the thread that reads, then aborts.
    frames_in = os.fdopen(os.dup(0), "rb")
    with contextlib.suppress(ValueError, OSError):  # as many connections as the system allows
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    job = frames.read(frames_in)
    if not isinstance(job, frames.GeneratorJob):
        return ExitCode.FAILURE
    try:
        try:
            import uvloop
        except ImportError:  # Windows
            asyncio.run(_run(job, frames_in, out))
        else:
            uvloop.run(_run(job, frames_in, out))
    except TgiError as error:
        print(f"error: {error.cause}\n{error.remedy}", file=sys.stderr)
        return error.exit_code
    return ExitCode.OK


async def _run(job: frames.GeneratorJob, frames_in: BinaryIO, out: BinaryIO) -> None:
    """Run a job; the parent process has the other ends of ``frames_in`` and ``out``."""
    loop = asyncio.get_running_loop()
    _, writer = await loop.connect_write_pipe(_FrameWriter, out)
    generator: LoadGenerator
    if job.target.kind == "shard-v3":
        from tgi_cli.bench.load.shard import ShardGenerator

        generator = ShardGenerator(job, writer.report)
    else:
        generator = HttpLoadGenerator(job, writer.report)
    begin: asyncio.Future[float] = loop.create_future()

    def begin_at(origin: float) -> None:
        if not begin.done():
            begin.set_result(origin)

    def stop() -> None:
        generator.stop()
        begin_at(0.0)

    async def put(items: list[frames.IndexedRequest]) -> None:
        for item in items:
            await generator.source.put(item)

    def feed() -> None:
        """Read frames, no faster than they are used."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the job is done
            while True:
                match frames.read(frames_in):
                    case frames.RequestChunk(items):
                        asyncio.run_coroutine_threadsafe(put(items), loop).result()
                    case frames.EndOfRequests():
                        asyncio.run_coroutine_threadsafe(generator.source.put(None), loop).result()
                    case frames.BeginStep(origin):
                        loop.call_soon_threadsafe(begin_at, origin)
                    case _:  # the parent process is gone
                        loop.call_soon_threadsafe(stop)
                        return

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    writer.closed.add_done_callback(lambda _: stop())
    threading.Thread(target=feed, daemon=True).start()
    writer.report(frames.GeneratorReady())
    origin = await begin
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)
    monitor = LagMonitor()
    if job.target.kind != "shard-v3":  # its calls are timed on a thread of their own
        monitor.start()
    await generator.run(origin)
    writer.report(frames.GeneratorEnded(monitor.stop(generator.late), generator.stopped))
    await writer.flush()


if __name__ == "__main__":
    sys.exit(main())
