"""Measure fault recovery: time until clients get errors, /health fails, and it recovers.

``python -m tests.benchmarks.faults [--model PATH] [--rounds 3] [--output X.json]``

Each round starts from a healthy server with streams in flight. One of its processes is killed
(SIGKILL), suspended (SIGSTOP) or terminated (SIGTERM). Times are seconds since the signal.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import httpx

from tests.tools.concurrent_requests import ConcurrentRequests
from tests.tools.process_tree import descendants_of, is_gone, shard_process_of
from tests.tools.server_process import ServerProcess, stop

_START_SECONDS = 600.0
_LIMIT_SECONDS = 300.0
"""Timeout for each event, after which it is reported as missing."""
_POLL_SECONDS = 0.02
FINISH_TOKENS = 600
"""Tokens of each stream that finishes after SIGTERM."""


class Server(ServerProcess):
    """``tgi serve`` on a free port, with practically unlimited restarts."""

    def __init__(self, options: argparse.Namespace, shards: int, folder: Path) -> None:
        arguments = ["serve", *options.model, "--hostname", "127.0.0.1", "--port", "0"]
        arguments += ["--json-output", "--num-shard", str(shards), "--max-restarts", "100"]
        arguments += ["--watchdog-timeout", str(options.watchdog_timeout)]
        arguments += ["--max-concurrent-requests", "256"]
        super().__init__(folder, arguments)
        self.wait_ready(_START_SECONDS)
        self._client = httpx.Client(base_url=self.url, timeout=10)

    def health(self) -> int | None:
        try:
            return self._client.get("/health").status_code
        except httpx.HTTPError:
            return None


@dataclass(slots=True)
class Round:
    """Measurements of one fault. Times are seconds since the signal, or None if not observed.

    Attributes:
        errors: when each stream that failed got its error event.
        unhealthy: when /health first returned anything but 200.
        healthy: when it returned 200 again.
        exited: when the command had exited and cleaned up.
        well, error, torn, hanging: number of streams that finished, ended with an error event,
            were cut off, and did not end.
        left: number of processes and files left behind after the command exited.
    """

    errors: list[float] = field(default_factory=list)
    unhealthy: float | None = None
    healthy: float | None = None
    exited: float | None = None
    well: int = 0
    error: int = 0
    torn: int = 0
    hanging: int = 0
    left: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal sent to one process.

    Attributes:
        victim: returns the process ID that gets the signal.
        recovers: whether the server becomes healthy again; otherwise, the command exits.
    """

    name: str
    number: signal.Signals
    victim: Callable[[Server], int]
    shards: int = 1
    recovers: bool = True
    new_tokens: int | None = None


def _shard(server: Server) -> int:
    return server.child("model-server")


def _second_shard(server: Server) -> int:
    return shard_process_of(_shard(server))


FAULTS = (
    Fault("model server killed", signal.SIGKILL, _shard),
    Fault("model server suspended", signal.SIGSTOP, _shard),
    Fault("shard 1 of 2 killed", signal.SIGKILL, _second_shard, shards=2),
    Fault("shard 1 of 2 suspended", signal.SIGSTOP, _second_shard, shards=2),
    Fault("router killed", signal.SIGKILL, lambda server: server.child("router"), recovers=False),
    Fault("launcher killed", signal.SIGKILL, lambda server: server.process.pid, recovers=False),
    Fault(
        "SIGTERM",
        signal.SIGTERM,
        lambda server: server.process.pid,
        recovers=False,
        new_tokens=FINISH_TOKENS,
    ),
)


def measure(server: Server, fault: Fault, streams: int, tokens: int) -> Round:
    """Cause a fault under load and measure the effects."""
    requests = ConcurrentRequests(
        server.url, ["openai stream"] * streams, fault.new_tokens or tokens
    )
    requests.wait_until_started(endless=fault.new_tokens is None)
    processes = [server.process.pid, *descendants_of(server.process.pid)]
    health = _Health(server)
    victim = fault.victim(server)
    began = time.monotonic()
    os.kill(victim, fault.number)
    result = Round()
    if not fault.recovers:
        _until(lambda: not server.running)
        _until(lambda: all(is_gone(pid) for pid in processes) and not _files(server))
        result.exited = time.monotonic() - began
        result.left = sum(not is_gone(pid) for pid in processes) + len(_files(server))
    outcomes = requests.outcomes(_LIMIT_SECONDS)
    for outcome in outcomes:
        setattr(result, outcome.kind, getattr(result, outcome.kind) + 1)
        if outcome.kind == "error":
            result.errors.append(outcome.at - began)
    result.hanging = requests.size - len(outcomes)
    if fault.recovers:
        _until(lambda: health.healthy is not None)
    health.close()
    if health.unhealthy is not None:
        result.unhealthy = health.unhealthy - began
    if health.healthy is not None:
        result.healthy = health.healthy - began
    return result


class _Health:
    """Polls /health in a thread."""

    def __init__(self, server: Server) -> None:
        self.unhealthy: float | None = None
        self.healthy: float | None = None
        self._server = server
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            status = self._server.health()
            if self.unhealthy is None and status != 200:
                self.unhealthy = time.monotonic()
            elif self.unhealthy is not None and self.healthy is None and status == 200:
                self.healthy = time.monotonic()


def _files(server: Server) -> list[Path]:
    return list(server.runtime.iterdir())


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _LIMIT_SECONDS
    while not condition() and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)


def _short(done: Round) -> str:
    fields = asdict(done) | {"errors": max(done.errors, default=None)}
    values = ((name, value) for name, value in fields.items() if value)
    return ", ".join(f"{name} {value:.4g}" for name, value in values)


def _row(fault: Fault, rounds: list[Round]) -> list[str]:
    errors = [at for each in rounds for at in each.errors]

    def middle(name: str) -> str:
        values = [value for each in rounds if (value := getattr(each, name)) is not None]
        return f"{median(values):.2f}" if values else "-"

    def total(name: str) -> str:
        return str(sum(getattr(each, name) for each in rounds))

    return [
        fault.name,
        f"{median(errors):.2f}" if errors else "-",
        f"{max(errors):.2f}" if errors else "-",
        middle("unhealthy"),
        middle("healthy"),
        middle("exited"),
        *map(total, ("well", "error", "torn", "hanging", "left")),
    ]


_HEAD = ["fault", "error", "last", "503", "healthy", "exited"]
_HEAD += ["well", "errors", "torn", "hang", "left"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs=1, default=[], help="checkpoint [the bundled model]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument(
        "--tokens", type=int, default=1900, help="tokens of streams meant to outlast the fault"
    )
    parser.add_argument("--watchdog-timeout", type=float, default=10.0)
    parser.add_argument("--only", help="only faults whose names contain this text")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results: dict[str, list[Round]] = {}
    server: Server | None = None
    shards = 0
    with tempfile.TemporaryDirectory(prefix="tgi-") as base:
        try:
            for fault in FAULTS:
                if options.only and options.only not in fault.name:
                    continue
                for turn in range(options.rounds):
                    if server is not None and (not server.running or shards != fault.shards):
                        stop(server.process, 120)
                        server = None
                    if server is None:
                        server = Server(
                            options, fault.shards, Path(base) / f"{len(results)}-{turn}"
                        )
                        shards = fault.shards
                    done = measure(server, fault, options.streams, options.tokens)
                    results.setdefault(fault.name, []).append(done)
                    print(
                        f"{fault.name}, round {turn + 1}: {_short(done)}",
                        file=sys.stderr,
                        flush=True,
                    )
        finally:
            if server is not None:
                stop(server.process, 120)
    table = [_HEAD] + [
        _row(fault, results[fault.name]) for fault in FAULTS if fault.name in results
    ]
    widths = [max(len(row[column]) for row in table) for column in range(len(_HEAD))]
    for row in table:
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        print(row[0].ljust(widths[0]), *cells, sep="  ")
    if options.output is not None:
        found = {name: [asdict(each) for each in rounds] for name, rounds in results.items()}
        settings = {key: getattr(options, key) for key in ("streams", "watchdog_timeout", "model")}
        options.output.write_text(json.dumps({"options": settings, "faults": found}, indent=1))


if __name__ == "__main__":
    main()
