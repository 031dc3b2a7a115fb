"""How soon a server that is full refuses: time to the first byte of a 429.

    python -m tests.benchmarks.overload [--seconds 20] [--concurrent 32] [--times 2]

The server takes ``--max-concurrent-requests``; clients hold twice as many streams of it at all
times: whoever is refused asks again after a pause, whoever is served asks again at once. So the
offered rate is twice what is served, or more. Each client is a process with raw sockets and
epoll that does nothing but send and note times; what it itself was late by (between a socket
that is readable and it being read, measured by a socket to itself) is told, and what it waited
for a processor.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.adversary.server import KEY, Server
from tests.benchmarks.adversary.watch import waited

BUDGET = 0.05


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of all does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * share) - 1, 0)] if ordered else 0.0


@dataclass
class _Ask:
    """A request in flight: when it began, and the status of its answer."""

    began: float
    status: int = 0


@dataclass
class Told:
    """What one client measured: seconds, but for the counts."""

    refused: list[float] = field(default_factory=list)
    admitted: list[float] = field(default_factory=list)
    lag: list[float] = field(default_factory=list)
    waited: float = 0.0
    other: dict[str, int] = field(default_factory=dict)


def _request(tokens: int) -> bytes:
    body = {
        "model": "tgi",
        "prompt": "def read_json(path):",
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
    head += f"authorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


class _Client:
    """Holds so many requests in flight."""

    def __init__(self, address: tuple[str, int], count: int, pause: float, tokens: int) -> None:
        self._address, self._pause, self._asked = address, pause, _request(tokens)
        self._selector = selectors.DefaultSelector()
        self._due: list[float] = [time.perf_counter() + pause * n / count for n in range(count)]
        self._told = Told()

    def run(self, seconds: float) -> Told:
        here, there = socket.socketpair()
        self._selector.register(here, selectors.EVENT_READ)
        own = os.getpid()
        files: dict[int, int] = {}
        before, end = waited(own, files), time.perf_counter() + seconds
        pinged = 0.0
        while (now := time.perf_counter()) < end:
            while self._due and self._due[0] <= now:
                self._due.pop(0)
                self._ask()
            if not pinged:
                pinged = time.perf_counter()
                there.send(b"a")
            for key, _ in self._selector.select(0.001):
                if key.fileobj is here:
                    here.recv(1)
                    self._told.lag.append(time.perf_counter() - pinged)
                    pinged = 0.0
                else:
                    self._read(key.fileobj, key.data)
        self._told.waited = waited(own, files) - before
        return self._told

    def _ask(self) -> None:
        began = time.perf_counter()
        connection = socket.create_connection(self._address, 30)
        connection.sendall(self._asked)
        self._selector.register(connection, selectors.EVENT_READ, _Ask(began))

    def _read(self, connection: Any, ask: _Ask) -> None:
        try:
            data = connection.recv(1 << 16)
        except OSError:
            data = b""
        now = time.perf_counter()
        if not ask.status:
            ask.status = int(data[9:12]) if data[9:12].isdigit() else -1
            if ask.status == 429:
                self._told.refused.append(now - ask.began)
            elif ask.status == 200:
                self._told.admitted.append(now - ask.began)
            else:
                name = str(ask.status)
                self._told.other[name] = self._told.other.get(name, 0) + 1
        if not data:
            self._selector.unregister(connection)
            connection.close()
            self._due.append(now if ask.status == 200 else now + self._pause)
            self._due.sort()


def _client(
    address: tuple[str, int], count: int, pause: float, tokens: int, seconds: float, answers: Any
) -> None:
    answers.put(_Client(address, count, pause, tokens).run(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--concurrent", type=int, default=32, help="that the server takes")
    parser.add_argument("--times", type=float, default=2.0, help="so much more is offered")
    parser.add_argument("--tokens", type=int, default=100, help="of an answer")
    parser.add_argument("--clients", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    server = Server(flags=["--max-concurrent-requests", str(options.concurrent)])
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    each = max(int(options.concurrent * options.times / options.clients), 1)
    # Refused at once, they would otherwise ask again at once.
    pause = 0.25
    try:
        own = (server.address, each, pause, options.tokens, options.seconds, answers)
        processes = [context.Process(target=_client, args=own) for _ in range(options.clients)]
        for process in processes:
            process.start()
        told: list[Told] = [answers.get(timeout=options.seconds + 60) for _ in processes]
        for process in processes:
            process.join()
    finally:
        server.close()
    refused = [value for one in told for value in one.refused]
    admitted = [value for one in told for value in one.admitted]
    lag = [value for one in told for value in one.lag]
    other: dict[str, int] = {}
    for one in told:
        for status, count in one.other.items():
            other[status] = other.get(status, 0) + count

    def shown(values: Sequence[float]) -> str:
        shares = [f"{percentile(values, share) * 1e3:.1f}" for share in (0.5, 0.99, 1.0)]
        return f"p50 {shares[0]}, p99 {shares[1]}, at most {shares[2]} ms"

    rate = (len(admitted) + len(refused)) / max(len(admitted), 1)
    print(
        f"{len(admitted)} admitted, {len(refused)} refused in {options.seconds:g} s: "
        f"{rate:.1f} times what was served was offered"
    )
    print(f"first byte of a refusal: {shown(refused)}")
    print(f"first byte of an answer: {shown(admitted)}")
    waits = ", ".join(f"{one.waited / options.seconds * 100:.1f}" for one in told)
    print(f"the clients' own lag: {shown(lag)}; they waited {waits} % of the time for a processor")
    if other:
        print(f"other answers: {other}")
    late = percentile(refused, 0.99)
    if options.json is not None:
        options.json.write_text(json.dumps({"refused": refused, "admitted": admitted, "lag": lag}))
    raise SystemExit(bool(other) or not refused or late > BUDGET)


if __name__ == "__main__":
    main()
