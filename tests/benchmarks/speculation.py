"""Compare decoding with and without drafts, on texts that repeat much and on texts that do not.

    python -m tests.tools.trained_model /tmp/m --from tgi_cli/demo/model --repeats --steps=1300
    python -m tests.tools.widened_model /tmp/m /tmp/wide
    python -m tests.benchmarks.speculation /tmp/wide [--clients 1 4 8 32] [--llama BUILD]

    python -m tests.tools.trained_model /tmp/trained
    python -m tests.tools.trained_model /tmp/draft --layers 1
    python -m tests.benchmarks.speculation /tmp/trained --draft /tmp/draft

    python -m tests.benchmarks.speculation /tmp/wide --workloads chat --clients 8 32 --control

Starts the server with ``--speculate 0`` and with ``--speculate auto`` (with ``--draft`` once more,
with ``--speculative-model``), and sends each the same waves in turns: C concurrent streams of
``/v1/completions`` with ``ignore_eos`` and prompts of token ids. ``--llama`` names a build folder
of llama.cpp, whose server takes part without speculation and with each of ``--llama-drafts``, with
one slot for each client. ``--peer`` adds any other server with that route, started by hand with the
same model. ``--control`` adds a second server without speculation: its ratio shows by how much two
equal servers differ. Figures are medians over the rounds of the tokens per second between the first
and the last byte of a wave; ratios are to ``--speculate 0``. A wave ends with its slowest stream:
``streams`` is the mean of the ratios of each stream's own rate. ``accepted`` is the share of draft
tokens that were accepted, ``a step`` the tokens of a stream per step, both from our ``/metrics``.

=========  ========================================================================================
workload   prompt
=========  ========================================================================================
rewrite    a module of the standard library, and its first lines again
quote      several modules, and the first half of a line out of one of them
records    records of JSON with the same keys, up to the fifth
chat       the beginning of a module, sampled at temperature 1
=========  ========================================================================================

Weights decide what is accepted. Random weights fall into cycles, which drafts predict perfectly:
use a trained model that has not seen the modules used here. The first command teaches the bundled
model to copy passages of its context, in ten minutes. Its steps take about a millisecond, of which
reading weights takes little: ``tests.tools.widened_model`` gives it the size of a published model,
whose steps are bound by memory, and leaves its text as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
import re
import statistics
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from tests.benchmarks.peers.contestant import Running, Setup
from tests.benchmarks.peers.llama_cpp import LlamaCpp
from tests.tools.demo import corpus
from tests.tools.server_process import ServerProcess, stop

_COUNTER = re.compile(r"^(tgi_draft\w*_total)(?:\{[^}]*\})? (\S+)$", re.M)


LLAMA_DRAFTS = {
    "off": "",
    "ngram-cache": "--spec-type ngram-cache --spec-draft-n-max 8",
    "ngram-simple": "--spec-type ngram-simple --spec-ngram-simple-size-n 4 "
    "--spec-ngram-simple-size-m 8",
    "ngram-mod": "--spec-type ngram-mod --spec-ngram-mod-n-match 4 --spec-ngram-mod-n-min 1 "
    "--spec-ngram-mod-n-max 8",
}
"""Flags of ``llama-server`` for drafts without weights, of about as many tokens as ours; by default
it drafts 48 behind a match of 12 or 24 tokens."""
CONTEXT = 2048
"""Tokens of a prompt and its answer, at most: what the trained model has."""


@functools.cache
def modules() -> list[str]:
    """Return the sources that the trained model has not seen."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    return [each.text for each in corpus.read_modules(stdlib) if corpus.is_heldout(each)]


def rewrite(texts: list[str], chance: random.Random) -> str:
    """A passage of about 40 lines twice, the second time only its beginning."""
    lines = chance.choice(texts).splitlines()
    start = chance.randrange(max(1, len(lines) - 40))
    passage = lines[start : start + 40]
    return "\n".join([*passage, "", *passage[:4], ""])


def quote(texts: list[str], chance: random.Random) -> str:
    """Passages, and the beginning of one of them again."""
    passages = []
    for _ in range(3):
        lines = chance.choice(texts).splitlines()
        start = chance.randrange(max(1, len(lines) - 20))
        passages.append("\n".join(lines[start : start + 20]))
    found = passages[chance.randrange(3)].splitlines()
    return "\n\n".join(passages) + "\n\n" + "\n".join(found[:3])


def records(texts: list[str], chance: random.Random) -> str:
    """JSON records, of which the next one is to be written."""
    words = re.findall(r"[a-z]{4,}", chance.choice(texts))
    rows = [
        {
            "name": chance.choice(words),
            "kind": "module",
            "lines": chance.randrange(900),
            "tests": [],
        }
        for _ in range(8)
    ]
    return json.dumps(rows, indent=2)[:-2] + ',\n  {\n    "name": "'


def chat(texts: list[str], chance: random.Random) -> str:
    """The beginning of a text."""
    text = chance.choice(texts)
    start = chance.randrange(max(1, len(text) - 400))
    return text[start : start + 400]


WORKLOADS: dict[str, tuple[Callable[[list[str], random.Random], str], float]] = {
    "rewrite": (rewrite, 0.0),
    "quote": (quote, 0.0),
    "records": (records, 0.0),
    "chat": (chat, 1.0),
}
"""How a prompt is made, and its temperature."""


@dataclass
class Server:
    """A server under test, and the rates that were measured."""

    name: str
    url: str
    rates: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    streams: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds of each stream, from its first to its last byte."""
    drafts: dict[tuple[str, int], list[float]] = field(
        default_factory=lambda: defaultdict(lambda: [0.0, 0.0, 0.0])
    )

    async def counters(self, client: httpx.AsyncClient) -> list[float]:
        """Return the totals of drafts, draft tokens and accepted tokens; zeros without them."""
        text = (await client.get(f"{self.url}/metrics")).text
        found = {name: float(value) for name, value in _COUNTER.findall(text)}
        names = ("tgi_drafts_total", "tgi_draft_tokens_total", "tgi_draft_accepted_tokens_total")
        return [found.get(name, 0.0) for name in names]

    async def wave(self, key: tuple[str, int], bodies: list[dict[str, Any]], keep: bool) -> None:
        """Send a wave and record its rate."""
        # A connection each: llama.cpp closes those on which it has answered with an error.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=600, limits=limits) as client:
            before = await self.counters(client)
            spans = await asyncio.gather(*(self._stream(client, body) for body in bodies))
            after = await self.counters(client)
        tokens = sum(body["max_tokens"] - 1 for body in bodies)
        seconds = max(end for _, end in spans) - min(first for first, _ in spans)
        if keep:
            self.rates[key].append(tokens / seconds)
            self.streams[key] += [end - first for first, end in spans]
            totals = self.drafts[key]
            for index in range(3):
                totals[index] += after[index] - before[index]

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[float, float]:
        first, content = 0.0, b""
        async with client.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            async for chunk in response.aiter_raw():
                first = first or time.perf_counter()
                content += chunk
        if response.status_code != 200 or b'"completion_tokens":%d' % body["max_tokens"] not in (
            content.replace(b" ", b"")
        ):
            raise RuntimeError(f"{self.name}: {response.status_code} {content[-300:]!r}")
        return first, time.perf_counter()


def bodies(
    workload: str, clients: int, tokens: int, tokenizer: Tokenizer, chance: random.Random
) -> list[dict[str, Any]]:
    """Return the requests of a wave."""
    make, temperature = WORKLOADS[workload]
    texts = modules()
    return [
        {
            "model": "tgi",
            "prompt": tokenizer.encode(make(texts, chance)).ids[-(CONTEXT - tokens) :],
            "cache_prompt": False,  # llama.cpp's; ours is started without a prefix cache
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": temperature,
            "seed": chance.randrange(1 << 31),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(clients)
    ]


async def measure(
    servers: list[Server], clients: int, tokenizer: Tokenizer, options: argparse.Namespace
) -> None:
    """Send every server the same waves of ``clients`` streams, in turns."""
    for workload in options.workloads:
        chance = random.Random(f"{options.seed} {workload} {clients}")
        for number in range(options.rounds + 1):  # the first one warms up
            wave = bodies(workload, clients, options.tokens, tokenizer, chance)
            turn = number % len(servers)
            for server in servers[turn:] + servers[:turn]:
                await server.wave((workload, clients), wave, number > 0)


class Llama:
    """llama.cpp's server with and without drafts, started anew for each number of clients.

    Args:
        build: its build folder.
        kinds: of ``LLAMA_DRAFTS``.
        model: a checkpoint, which is converted.
        folder: for the conversion and logs.
    """

    def __init__(self, build: Path, kinds: list[str], model: Path, folder: Path) -> None:
        python = Path(sys.executable)
        self._contestants = [
            LlamaCpp(build, "bf16", python, f"llama.cpp {kind}", LLAMA_DRAFTS[kind].split())
            for kind in kinds
        ]
        self.servers = [Server(each.name, "") for each in self._contestants]
        folder.mkdir()
        self._log = folder / "log"
        self._model = self._contestants[0].prepare(model, folder)

    def start(self, clients: int) -> list[Running]:
        """Start one process of each kind."""
        started: list[Running] = []
        setup = Setup(clients, CONTEXT, clients * CONTEXT)
        for contestant, server in zip(self._contestants, self.servers, strict=True):
            running = contestant.start(self._model, setup, self._log)
            started.append(running)
            server.url = running.url
        return started


def report(servers: list[Server], options: argparse.Namespace) -> None:
    """Print a table."""
    off = servers[0]
    columns = ("tok/s", "ratio", "streams", "accepted", "a step")
    names = [f"{server.name}: {columns[0]} | {' | '.join(columns[1:])}" for server in servers[1:]]
    print(f"| workload | clients | off: tok/s | {' | '.join(names)} |")
    print("|---" * (3 + len(columns) * len(names)) + "|")
    for workload in options.workloads:
        for clients in options.clients:
            key = (workload, clients)
            base = statistics.median(off.rates[key])
            cells = []
            for server in servers[1:]:
                ratios = [a / b for a, b in zip(server.rates[key], off.rates[key], strict=True)]
                middle, ratio = statistics.median(server.rates[key]), statistics.median(ratios)
                pairs = zip(off.streams[key], server.streams[key], strict=True)
                streams = statistics.mean(without / taken for without, taken in pairs)
                _, drafted, accepted = server.drafts[key]
                tokens = options.rounds * clients * (options.tokens - 1)
                share = f"{accepted / drafted:.0%}" if drafted else "-"
                steps = f"{tokens / (tokens - accepted):.2f}" if tokens > accepted else "-"
                spread = f"{ratio:.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
                cells.append(f"{middle:.1f} | {spread} | {streams:.2f} | {share} | {steps}")
            print(f"| {workload} | {clients} | {base:.1f} | {' | '.join(cells)} |")


def contestants(options: argparse.Namespace) -> list[tuple[str, str, list[str]]]:
    """Name of each server of ours, its ``--speculate``, and further flags."""
    found: list[tuple[str, str, list[str]]] = [("off", "0", []), ("on", options.speculate, [])]
    if options.control:
        found.append(("control", "0", []))
    if options.draft is not None:
        flags = [f"--speculative-model={options.draft}"]
        found.append(("weights", options.speculate, flags))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speculate", default="auto")
    parser.add_argument("--control", action="store_true", help="a second server without drafts")
    parser.add_argument("--draft", type=Path, help="weights that draft: a third server has them")
    parser.add_argument("--llama", type=Path, help="build folder of llama.cpp")
    parser.add_argument(
        "--llama-drafts", nargs="+", choices=LLAMA_DRAFTS, default=["off", "ngram-cache"]
    )
    parser.add_argument("--peer", action="append", default=[], help="URL of a peer")
    parser.add_argument("--serve", nargs="*", default=[], help="extra flags of `tgi serve`: --x=y")
    options = parser.parse_args()
    options.model = options.model.absolute()
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    started: list[ServerProcess] = []
    with tempfile.TemporaryDirectory() as folder:
        llama = None
        if options.llama is not None:
            kinds, models = options.llama_drafts, Path(folder) / "llama"
            llama = Llama(options.llama.absolute(), kinds, options.model, models)
        try:
            servers = []
            for name, value, more in contestants(options):
                flags = [f"--speculate={value}", "--port=0", "--no-prefix-caching", *more]
                words = ["serve", str(options.model), *flags, *options.serve]
                process = ServerProcess(Path(folder) / name, words)
                started.append(process)
                process.wait_ready()
                servers.append(Server(name, process.url))
            servers += [Server(url, url) for url in options.peer]
            if llama is not None:
                servers += llama.servers
            for clients in options.clients:
                beside = [] if llama is None else llama.start(clients)
                try:
                    asyncio.run(measure(servers, clients, tokenizer, options))
                finally:
                    for running in beside:
                        running.close()
            report(servers, options)
        finally:
            for process in started:
                stop(process.process)


if __name__ == "__main__":
    main()
