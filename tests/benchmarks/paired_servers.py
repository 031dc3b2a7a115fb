"""Sends the same waves of requests to several servers, and compares their rates pair by pair.

Servers take turns, in an order in which each comes first, last, and behind each other one equally
often. A wave has three parts, of which the last one is measured:

1. All its prompts with answers of one token, after which the prefix cache has them.
2. A request with a long prompt, so that
3. those of the wave arrive while the server is busy, and begin in the same step.

The rate is that of the tokens after the last stream has begun, to the end of the slowest one: what
prompts take is no part of it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import uvloop

from tests.benchmarks.peers.client import Stream, completions_request, events
from tests.benchmarks.peers.machine import descendants, process_ticks
from tests.tools.server_process import ServerProcess

Cell = tuple[str, int]
"""A workload and a number of clients."""

_COUNTER = re.compile(r"^(tgi_draft\w*_total)(?:\{[^}]*\})? (\S+)$", re.M)

_HOLDING_SECONDS = 0.01
"""Time for the long prompt to arrive before the others."""

_TIMEOUT = 600.0

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Wave:
    """What a server did in one wave.

    Attributes:
        rate: tokens per second.
        streams: seconds of each stream, from its first to its last token.
        texts: the answers.
        drafts: drafts, draft tokens and accepted tokens; zeros of servers without these counters.
    """

    rate: float
    streams: list[float]
    texts: list[str]
    drafts: list[float]


@dataclass
class Server:
    """A server under test, and its waves.

    Attributes:
        name: for the table.
        url: of a running process.
        process: if it is ours.
        waves: the counted ones, each with that of the first server in the same round.
    """

    name: str
    url: str
    process: ServerProcess | None = None
    waves: dict[Cell, list[tuple[Wave, Wave]]] = field(default_factory=lambda: defaultdict(list))
    _processes: list[int] = field(default_factory=list)

    def begin(self, url: str, process: ServerProcess | None = None) -> None:
        """Use another process from now on, which is ready."""
        self.url, self.process = url, process
        self._processes = [] if process is None else descendants(process.process.pid)

    def ratios(self, cell: Cell) -> list[float]:
        """Its rates as multiples of those of the first server, one for each round."""
        return [wave.rate / first.rate for wave, first in self.waves[cell]]

    def streams(self, cell: Cell) -> float:
        """The mean of the ratios of each stream's own rate."""
        return statistics.mean(
            without / taken
            for wave, first in self.waves[cell]
            for taken, without in zip(wave.streams, first.streams, strict=True)
        )

    def cpu_seconds(self) -> float:
        """CPU time of its processes until now."""
        return sum(_ticks(pid) for pid in self._processes) / _TICKS

    def huge_pages(self) -> tuple[int, int]:
        """Bytes of the model server's anonymous memory in huge pages, and all of them."""
        assert self.process is not None
        path = Path(f"/proc/{self.process.child('model-server')}/smaps_rollup")
        sizes = dict(re.findall(r"(\w+): +(\d+) kB", path.read_text()))
        return int(sizes["AnonHugePages"]) << 10, int(sizes["Anonymous"]) << 10

    def send(self, bodies: Sequence[Mapping[str, Any]], holding: Mapping[str, Any]) -> Wave:
        """Send a wave and wait for its end.

        Args:
            bodies: the requests.
            holding: the one that keeps the server busy while they arrive.
        """
        before = self._counters()
        uvloop.run(asyncio.wait_for(self._exchange([_short(body) for body in bodies]), _TIMEOUT))
        gc.collect()
        gc.disable()
        try:
            streams = uvloop.run(asyncio.wait_for(self._exchange(bodies, holding), _TIMEOUT))
        finally:
            gc.enable()
        after = self._counters()
        drafts = [late - early for early, late in zip(before, after, strict=True)]
        read = [_read(s, body["max_tokens"]) for s, body in zip(streams, bodies, strict=True)]
        begun = max(answer.times[0] for answer in read)
        seconds = max(answer.times[-1] for answer in read) - begun
        tokens = sum(answer.tokens_after(begun) for answer in read)
        spans = [answer.times[-1] - answer.times[0] for answer in read]
        return Wave(tokens / seconds, spans, [answer.text for answer in read], drafts)

    async def _exchange(
        self, bodies: Sequence[Mapping[str, Any]], holding: Mapping[str, Any] | None = None
    ) -> list[Stream]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None, self.url
        host, port = parts.hostname, parts.port or 80
        loop = asyncio.get_running_loop()

        async def send(body: Mapping[str, Any]) -> Stream:
            ended: asyncio.Future[None] = loop.create_future()
            request = completions_request(parts.netloc, body)
            _, stream = await loop.create_connection(lambda: Stream(request, ended), host, port)
            await ended
            return stream

        held = []
        if holding is not None:
            held.append(asyncio.ensure_future(send(holding)))
            await asyncio.sleep(_HOLDING_SECONDS)
        streams = await asyncio.gather(*(send(body) for body in bodies))
        await asyncio.gather(*held)
        return streams

    def _counters(self) -> list[float]:
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        found = {name: float(value) for name, value in _COUNTER.findall(text)}
        names = ("tgi_drafts_total", "tgi_draft_tokens_total", "tgi_draft_accepted_tokens_total")
        return [found.get(name, 0.0) for name in names]


def _ticks(pid: int) -> int:
    try:
        return process_ticks(Path(f"/proc/{pid}/stat").read_text())
    except OSError:  # it has exited
        return 0


def _short(body: Mapping[str, Any]) -> dict[str, Any]:
    return {**body, "max_tokens": 1}


class _Answer(NamedTuple):
    """An answer of ``tokens`` tokens, and when its events arrived."""

    times: list[float]
    text: str
    tokens: int

    def tokens_after(self, moment: float) -> float:
        """Tokens that arrived after ``moment``; events have equally many."""
        return self.tokens * sum(time > moment for time in self.times) / len(self.times)


def _read(stream: Stream, tokens: int) -> _Answer:
    """Parse a response. Raises peers' Failure if it is an error or has too few tokens."""
    stream.span(tokens)
    times, parts = [], []
    for moment, event in events(stream.parts):
        if event.get("choices"):
            times.append(moment)
            parts.append(event["choices"][0].get("text") or "")
    return _Answer(times[:tokens], "".join(parts), tokens)


def order(servers: Sequence[Server], number: int) -> list[Server]:
    """The turns of a round: for two servers ABBA BAAB, for three ABC CBA BCA ACB CAB BAC."""
    shift = number // 2 % len(servers)
    turned = [*servers[shift:], *servers[:shift]]
    return turned[::-1] if number % 2 else turned


class Comparison:
    """Measures servers against the first one, in rounds of a wave for each.

    Args:
        servers: the first one is what the others are compared to.

    Attributes:
        idle_seconds: CPU time that our servers have used while others were measured.
        seconds: the time of these waves, once for each such server.
        different: answers of our servers that differ from those of the first one.
    """

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = servers
        self.idle_seconds = 0.0
        self.seconds = 0.0
        self.different = 0
        self._rounds: dict[Cell, int] = defaultdict(int)
        self.took: dict[Cell, float] = {}

    def round(
        self,
        cell: Cell,
        servers: Sequence[Server],
        bodies: Sequence[Mapping[str, Any]],
        holding: Mapping[str, Any],
    ) -> None:
        """Send a wave to each of ``servers``, of which the first one is that of all."""
        began = time.perf_counter()
        sent: dict[str, Wave] = {}
        for server in order(servers, self._rounds[cell]):
            sent[server.name] = self._wave(server, bodies, holding)
        self._rounds[cell] += 1
        first = sent[servers[0].name]
        for server in servers:
            wave = sent[server.name]
            server.waves[cell].append((wave, first))
            if server.process is not None:
                pairs = zip(wave.texts, first.texts, strict=True)
                self.different += sum(one != other for one, other in pairs)
        self.took[cell] = time.perf_counter() - began

    def _wave(
        self, server: Server, bodies: Sequence[Mapping[str, Any]], holding: Mapping[str, Any]
    ) -> Wave:
        others = [each for each in self.servers if each is not server and each.process is not None]
        before, began = sum(each.cpu_seconds() for each in others), time.perf_counter()
        wave = server.send(bodies, holding)
        self.idle_seconds += sum(each.cpu_seconds() for each in others) - before
        self.seconds += (time.perf_counter() - began) * len(others)
        return wave

    def number(self, cell: Cell) -> int:
        """Counted rounds of a cell."""
        return self._rounds[cell]

    def uncertainty(self, cell: Cell) -> float:
        """How wide the ranges of a cell are, as a multiple of what is asked of them.

        A range is narrow enough if it is a hundredth to each side of the median, or where the
        median is far from 1, a fifth of that.
        """
        found = 0.0
        for server in self.servers[1:]:
            ratios = server.ratios(cell)
            if server.process is None or not ratios:
                continue
            if len(ratios) < 3:
                return float("inf")
            middle, (low, high) = statistics.median(ratios), median_range(ratios)
            found = max(found, (high - low) / 2 / max(0.01, abs(middle - 1) / 5))
        return found


def median_range(values: Sequence[float], chance: float = 0.9) -> tuple[float, float]:
    """The range that has the median of what values are drawn from, with a probability.

    Of few values, it is the least and the most. No distribution is assumed (the sign test's
    interval: Conover, Practical Nonparametric Statistics, 3.2).
    """
    ordered, count = sorted(values), len(values)
    outside, cut = 2.0 / 2**count, 0  # that all values are on one side of the median
    while outside + 2 * comb(count, cut + 1) / 2**count <= 1 - chance:
        cut += 1
        outside += 2 * comb(count, cut) / 2**count
    return ordered[cut], ordered[-1 - cut]
