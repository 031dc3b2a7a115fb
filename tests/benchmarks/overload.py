"""How soon a server that is full refuses: time to the first byte of a 429.

    python -m tests.benchmarks.overload [--seconds 20] [--concurrent 32] [--times 2]

The server takes ``--max-concurrent-requests``. First so many clients, who ask again as soon as
they are served, show how many requests it serves in a second. Then requests arrive at random
times (a Poisson process) at twice that rate, whatever becomes of those before. Times are from
before the connection is opened to the first byte of the answer. Each client is a process with
raw sockets and epoll that does nothing but send and note times; how late it was itself is told
(from a byte on a socket to itself to its being read), and how long it waited for a processor.
Clients have
the last of the cores for themselves, the server the others: a client that waits for a processor
measures that. The exit status is 1 if the 99th percentile of refusals is above 50 ms.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
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
    served: int = 0
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
    """Holds so many requests in flight, or, with a rate, lets so many arrive in a second."""

    def __init__(
        self, address: tuple[str, int], count: int, rate: float, tokens: int, seed: int
    ) -> None:
        self._address, self._rate, self._asked = address, rate, _request(tokens)
        self._selector = selectors.DefaultSelector()
        self._dice = random.Random(seed)
        self._told = Told()
        self._due = [time.perf_counter()] * (1 if rate else count)

    def run(self, seconds: float) -> Told:
        """Until the end of the time; what is in flight then is left."""
        here, there = socket.socketpair()
        self._selector.register(here, selectors.EVENT_READ)
        own, files = os.getpid(), dict[int, int]()
        before, end = waited(own, files), time.perf_counter() + seconds
        pinged = 0.0
        while (now := time.perf_counter()) < end:
            while self._due and self._due[0] <= now:
                due = self._due.pop(0)
                self._ask()
                if self._rate:
                    self._due.append(due + self._dice.expovariate(self._rate))
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
            self._told.served += ask.status == 200
            if not self._rate:
                self._due.append(now)


def _client(answers: Any, seconds: float, cores: set[int], *own: Any) -> None:
    os.sched_setaffinity(0, cores)
    answers.put(_Client(*own).run(seconds))


def _all(
    clients: int,
    seconds: float,
    cores: set[int],
    address: tuple[str, int],
    count: int,
    rate: float,
    tokens: int,
) -> list[Told]:
    """What so many processes measured together."""
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    each = (address, math.ceil(count / clients), rate / clients, tokens)
    processes = [
        context.Process(target=_client, args=(answers, seconds, cores, *each, seed))
        for seed in range(clients)
    ]
    for process in processes:
        process.start()
    told = [answers.get(timeout=seconds + 60) for _ in processes]
    for process in processes:
        process.join()
    return told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--concurrent", type=int, default=32, help="that the server takes")
    parser.add_argument("--times", type=float, default=2.0, help="so much more is offered")
    parser.add_argument("--tokens", type=int, default=100, help="of an answer")
    parser.add_argument("--clients", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:-1] or cores)
    server = Server(flags=["--max-concurrent-requests", str(options.concurrent)])
    try:
        own = ({cores[-1]}, server.address, options.concurrent)
        first = _all(1, options.seconds / 2, *own, 0.0, options.tokens)[0]
        rate = first.served / (options.seconds / 2)
        if not rate:
            raise SystemExit("nothing was served: give it more --seconds or fewer --tokens")
        told = _all(options.clients, options.seconds, *own, rate * options.times, options.tokens)
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

    print(
        f"{rate:.1f} requests/s are served, {rate * options.times:.1f} offered: "
        f"{len(admitted)} admitted, {len(refused)} refused in {options.seconds:g} s"
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
