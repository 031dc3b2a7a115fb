"""Measure how soon a full server refuses requests: time to the first byte of a 429.

    python -m tests.benchmarks.overload [--seconds 20] [--concurrent 32] [--times 2]

A closed loop of ``--concurrent`` clients, the server's ``--max-concurrent-requests``, measures its
throughput. Then requests arrive at random times (a Poisson process) at ``--times`` that rate,
independent of earlier ones. Times are from before the connection is opened to the first byte of
the response. Each client is a process with raw sockets and epoll that only sends requests and
records times. It reports its own lag (from writing a byte to a socket pair until it is read) and
the time that it waited for a CPU. The clients run on the last core, the server on the others, so
that they do not delay each other. Exits with status 1 if the 99th percentile of refusals exceeds
50 ms.
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

from tests.benchmarks.adversary.monitor import run_queue_seconds
from tests.benchmarks.adversary.server import KEY, Server

BUDGET = 0.05


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile of ``values``, or 0 if sender are none."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * share) - 1, 0)] if ordered else 0.0


@dataclass
class _Request:
    """A request in flight: its start time, and the status of its response."""

    began: float
    status: int = 0


@dataclass
class Measurements:
    """Measurements of one client, in seconds and counts."""

    refused: list[float] = field(default_factory=list)
    admitted: list[float] = field(default_factory=list)
    lag: list[float] = field(default_factory=list)
    cpu_wait: float = 0.0
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
    """Keeps ``count`` requests in flight, or sends ``rate`` requests per second on average."""

    def __init__(
        self, address: tuple[str, int], count: int, rate: float, tokens: int, seed: int
    ) -> None:
        self._address, self._rate, self._content = address, rate, _request(tokens)
        self._selector = selectors.DefaultSelector()
        self._random = random.Random(seed)
        self._measurements = Measurements()
        self._due = [time.perf_counter()] * (1 if rate else count)

    def run(self, seconds: float) -> Measurements:
        """Run for ``seconds``; requests that are then in flight are abandoned."""
        receiver, sender = socket.socketpair()
        self._selector.register(receiver, selectors.EVENT_READ)
        own, files = os.getpid(), dict[int, int]()
        before, end = run_queue_seconds(own, files), time.perf_counter() + seconds
        sent_at = 0.0
        while (now := time.perf_counter()) < end:
            while self._due and self._due[0] <= now:
                due = self._due.pop(0)
                self._send()
                if self._rate:
                    self._due.append(due + self._random.expovariate(self._rate))
            if not sent_at:
                sent_at = time.perf_counter()
                sender.send(b"a")
            for key, _ in self._selector.select(0.001):
                if key.fileobj is receiver:
                    receiver.recv(1)
                    self._measurements.lag.append(time.perf_counter() - sent_at)
                    sent_at = 0.0
                else:
                    self._read(key.fileobj, key.data)
        self._measurements.cpu_wait = run_queue_seconds(own, files) - before
        return self._measurements

    def _send(self) -> None:
        began = time.perf_counter()
        connection = socket.create_connection(self._address, 30)
        connection.sendall(self._content)
        self._selector.register(connection, selectors.EVENT_READ, _Request(began))

    def _read(self, connection: Any, request: _Request) -> None:
        try:
            data = connection.recv(1 << 16)
        except OSError:
            data = b""
        now = time.perf_counter()
        if not request.status:
            request.status = int(data[9:12]) if data[9:12].isdigit() else -1
            if request.status == 429:
                self._measurements.refused.append(now - request.began)
            elif request.status == 200:
                self._measurements.admitted.append(now - request.began)
            else:
                name = str(request.status)
                self._measurements.other[name] = self._measurements.other.get(name, 0) + 1
        if not data:
            self._selector.unregister(connection)
            connection.close()
            self._measurements.served += request.status == 200
            if not self._rate:
                self._due.append(now)


def _client(answers: Any, seconds: float, cores: set[int], *arguments: Any) -> None:
    os.sched_setaffinity(0, cores)
    answers.put(_Client(*arguments).run(seconds))


def _run_clients(
    clients: int,
    seconds: float,
    cores: set[int],
    address: tuple[str, int],
    count: int,
    rate: float,
    tokens: int,
) -> list[Measurements]:
    """Run ``clients`` processes and return the measurements of each."""
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    each = (address, math.ceil(count / clients), rate / clients, tokens)
    processes = [
        context.Process(target=_client, args=(answers, seconds, cores, *each, seed))
        for seed in range(clients)
    ]
    for process in processes:
        process.start()
    measurements = [answers.get(timeout=seconds + 60) for _ in processes]
    for process in processes:
        process.join()
    return measurements


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--concurrent", type=int, default=32, help="--max-concurrent-requests")
    parser.add_argument("--times", type=float, default=2.0, help="offered to served rate")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of a response")
    parser.add_argument("--clients", type=int, default=1, help="client processes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:-1] or cores)
    server = Server(flags=["--max-concurrent-requests", str(options.concurrent)])
    try:
        arguments = ({cores[-1]}, server.address, options.concurrent)
        first = _run_clients(1, options.seconds / 2, *arguments, 0.0, options.tokens)[0]
        rate = first.served / (options.seconds / 2)
        if not rate:
            raise SystemExit("nothing was served: increase --seconds or lower --tokens")
        measurements = _run_clients(
            options.clients, options.seconds, *arguments, rate * options.times, options.tokens
        )
    finally:
        server.close()
    refused = [value for one in measurements for value in one.refused]
    admitted = [value for one in measurements for value in one.admitted]
    lag = [value for one in measurements for value in one.lag]
    other: dict[str, int] = {}
    for one in measurements:
        for status, count in one.other.items():
            other[status] = other.get(status, 0) + count

    def shown(values: Sequence[float]) -> str:
        shares = [f"{percentile(values, share) * 1e3:.1f}" for share in (0.5, 0.99, 1.0)]
        return f"p50 {shares[0]}, p99 {shares[1]}, maximum {shares[2]} ms"

    print(
        f"{rate:.1f} requests/s served, {rate * options.times:.1f} offered: "
        f"{len(admitted)} admitted, {len(refused)} refused in {options.seconds:g} s"
    )
    print(f"first byte of a refusal: {shown(refused)}")
    print(f"first byte of a response: {shown(admitted)}")
    waits = ", ".join(f"{one.cpu_wait / options.seconds * 100:.1f}" for one in measurements)
    print(f"client lag: {shown(lag)}; they waited {waits} % of the time for a CPU")
    if other:
        print(f"other responses: {other}")
    late = percentile(refused, 0.99)
    if options.json is not None:
        options.json.write_text(json.dumps({"refused": refused, "admitted": admitted, "lag": lag}))
    raise SystemExit(bool(other) or not refused or late > BUDGET)


if __name__ == "__main__":
    main()
