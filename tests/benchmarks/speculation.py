"""Compare decoding with and without drafts, on texts that repeat much and on texts that do not.

    python -m tests.tools.trained_model /tmp/m --from tgi_cli/demo/model --repeats --steps=1300
    python -m tests.tools.widened_model /tmp/m /tmp/wide
    python -m tests.benchmarks.speculation /tmp/wide [--clients 1 4 8 32] [--llama BUILD]

    python -m tests.tools.trained_model /tmp/trained
    python -m tests.tools.trained_model /tmp/draft --layers 1
    python -m tests.benchmarks.speculation /tmp/trained --draft /tmp/draft

    python -m tests.benchmarks.speculation /tmp/wide --minutes 12 --control 8

Starts the server with ``--speculate 0`` and with ``--speculate auto`` (with ``--draft`` once more,
with ``--speculative-model``), and sends each the same waves of C concurrent streams of
``/v1/completions``, with ``ignore_eos`` and the same seeds: the answers are the same, too, which is
checked. :mod:`tests.benchmarks.draft_texts` has the workloads and
:mod:`tests.benchmarks.paired_servers` what of a wave is measured. ``--control`` adds a second
server without speculation, for all numbers of clients or some: its ratio shows by how much two
equal servers differ.

All servers are started ``--starts`` times, in changing orders, since where the weights are in
memory makes one process faster than the next. After each start, a wave of 32 tokens of each kind
warms up, and ``--rounds`` rounds are counted. With ``--minutes`` the run takes about that long:
what is left after these rounds goes to the workloads and numbers of clients whose ratios are the
least certain.

Figures are medians over the rounds. ``ratio`` is that of the rates of a round to ``--speculate 0``,
with the range that has its median with a probability of 90 % (of few rounds, the least and the
most). A wave ends with its slowest stream: ``streams`` is the mean of the ratios of each stream's
own rate. ``accepted`` is the share of draft tokens that were accepted, ``a step`` the tokens of a
stream per step, both from our ``/metrics``.

``--llama`` names a build folder of llama.cpp, whose server takes part without speculation and with
each of ``--llama-drafts``, with one slot for each client and one more. ``--peer`` adds any other
server with that route, started by hand with the same model. Peers take part in ``--peer-rounds`` of
the rounds after each start, since they compute all prompts of each wave.

Weights decide what is accepted. Random weights fall into cycles, which drafts predict perfectly:
use a trained model that has not seen the modules used here. The first command teaches the bundled
model to copy passages of its context, in ten minutes. Its steps take about a millisecond, of which
reading weights takes little: ``tests.tools.widened_model`` gives it the size of a published model,
whose steps are bound by memory, and leaves its text as it is.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from tests.benchmarks.draft_texts import LENGTH, WORKLOADS, Texts
from tests.benchmarks.paired_servers import Cell, Comparison, Server, median_range
from tests.benchmarks.peers.contestant import Setup
from tests.benchmarks.peers.llama_cpp import LlamaCpp
from tests.benchmarks.peers.machine import Clock, description
from tests.tools.server_process import ServerProcess, stop

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

LLAMA_SAMPLING = "--top-k 0 --top-p 1 --min-p 0"
"""Samples from the whole vocabulary, as ours do; its defaults make chats easier to predict."""

WARM_TOKENS = 32
"""Tokens of an answer that warms a server up."""

HOLDING_TOKENS = 512
"""Tokens of the prompt during which the requests of a wave arrive."""


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
        flags = {kind: [*LLAMA_SAMPLING.split(), *LLAMA_DRAFTS[kind].split()] for kind in kinds}
        self._contestants = [
            LlamaCpp(build, "bf16", python, f"llama.cpp {kind}", flags[kind]) for kind in kinds
        ]
        self.servers = [Server(each.name, "") for each in self._contestants]
        folder.mkdir()
        self._log = folder / "log"
        self._model = self._contestants[0].prepare(model, folder)

    @contextmanager
    def running(self, clients: int) -> Iterator[None]:
        """Run one process of each kind."""
        setup = Setup(clients + 1, LENGTH, (clients + 1) * LENGTH)
        with ExitStack() as stack:
            for contestant, server in zip(self._contestants, self.servers, strict=True):
                started = contestant.start(self._model, setup, self._log)
                stack.callback(started.close)
                server.begin(started.url)
            yield


class Run:
    """Starts the servers and measures all workloads and numbers of clients.

    Args:
        options: of the command.
        folder: for runtime folders and logs.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._texts = Texts(
            Tokenizer.from_file(str(options.model / "tokenizer.json")), options.seed
        )
        self._flags = dict(contestants(options))
        self._own = [Server(name, "") for name in self._flags]
        self._peers = [Server(url, url) for url in options.peer]
        self._llama: Llama | None = None
        if options.llama is not None:
            build, kinds = options.llama.absolute(), options.llama_drafts
            self._llama = Llama(build, kinds, options.model, folder / "llama")
            self._peers += self._llama.servers
        self.comparison = Comparison([*self._own, *self._peers])
        self._until = 0.0

    def start(self, number: int, seconds: float | None) -> None:
        """Start our servers, measure, and stop them.

        Args:
            number: of the start.
            seconds: until it is to have ended; None for the counted rounds and no more.
        """
        self._until = float("inf") if seconds is None else time.monotonic() + seconds
        with ExitStack() as stack:
            for server in self._own[::-1] if number % 2 else self._own:
                words = ["serve", str(self._options.model), "--port=0", *self._flags[server.name]]
                folder = self._folder / f"{server.name} {number}"
                process = ServerProcess(folder, [*words, *self._options.serve])
                stack.callback(stop, process.process)
                process.wait_ready()
                server.begin(process.url, process)
            self._measure(number)
            for server in self._own:
                huge, anonymous = server.huge_pages()
                print(f"{server.name}: {huge >> 20} of {anonymous >> 20} MiB are in huge pages")

    def _measure(self, start: int) -> None:
        workloads, options = self._options.workloads, self._options
        for clients in options.clients:
            with ExitStack() as stack:
                if self._llama is not None:
                    stack.enter_context(self._llama.running(clients))
                for workload in workloads:
                    self._warm_up((workload, clients), start)
                for number in range(options.rounds):
                    peers = self._peers if number < options.peer_rounds else None
                    for workload in workloads:
                        self._round((workload, clients), peers)
        if self._until == float("inf"):
            return
        cells = [(workload, clients) for clients in options.clients for workload in workloads]
        while True:
            left = self._until - time.monotonic()
            fit = [cell for cell in cells if self.comparison.took.get(cell, 0.0) < left]
            if not fit:
                return
            self._round(max(fit, key=self.comparison.uncertainty))

    def _servers(self, cell: Cell, peers: list[Server] | None) -> list[Server]:
        named = self._options.control
        skips = named and cell[1] not in named
        own = [server for server in self._own if not (skips and server.name == "control")]
        return own + (peers or [])

    def _warm_up(self, cell: Cell, start: int) -> None:
        bodies = self._texts.wave(*cell, WARM_TOKENS, -1 - start)
        for server in self._servers(cell, self._peers):
            server.send(bodies, self._texts.holding(HOLDING_TOKENS, -1))

    def _round(self, cell: Cell, peers: list[Server] | None = None) -> None:
        """A counted round, if there is time for it."""
        if self.comparison.took.get(cell, 0.0) > self._until - time.monotonic():
            return
        number = self.comparison.number(cell)
        servers = self._servers(cell, peers)
        bodies = self._texts.wave(*cell, self._options.tokens, number)
        holding = self._texts.holding(HOLDING_TOKENS, number)
        self.comparison.round(cell, servers, bodies, holding)
        found = (f"{each.name} {each.ratios(cell)[-1]:.3f}" for each in servers[1:])
        print(f"{cell[0]} {cell[1]}: {', '.join(found)}", flush=True)


def report(comparison: Comparison, options: argparse.Namespace) -> None:
    """Print a table."""
    off, *others = comparison.servers
    columns = ("tok/s", "ratio", "streams", "accepted", "a step")
    names = [f"{server.name}: {columns[0]} | {' | '.join(columns[1:])}" for server in others]
    print(f"\n| workload | clients | rounds | off: tok/s | {' | '.join(names)} |")
    print("|---" * (4 + len(columns) * len(names)) + "|")
    for workload in options.workloads:
        for clients in options.clients:
            cell = (workload, clients)
            if not off.waves[cell]:
                continue
            base = statistics.median(wave.rate for wave, _ in off.waves[cell])
            cells = [_cells(server, cell, options.tokens) for server in others]
            count = len(off.waves[cell])
            print(f"| {workload} | {clients} | {count} | {base:.1f} | {' | '.join(cells)} |")


def _cells(server: Server, cell: Cell, tokens: int) -> str:
    waves = [wave for wave, _ in server.waves[cell]]
    if not waves:
        return " | ".join(["-"] * 5)
    ratios = server.ratios(cell)
    low, high = median_range(ratios)
    drafted, accepted = (sum(wave.drafts[index] for wave in waves) for index in (1, 2))
    given = len(waves) * cell[1] * (tokens - 1)
    found = (
        f"{statistics.median(wave.rate for wave in waves):.1f}",
        f"{statistics.median(ratios):.3f} ({low:.3f}-{high:.3f})",
        f"{server.streams(cell):.3f}",
        f"{accepted / drafted:.0%}" if drafted else "-",
        f"{given / (given - accepted):.2f}" if given > accepted else "-",
    )
    return " | ".join(found)


def contestants(options: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Name of each server of ours, and its flags."""
    found: list[tuple[str, list[str]]] = [
        ("off", ["--speculate=0"]),
        ("on", [f"--speculate={options.speculate}"]),
    ]
    if options.control is not None:
        found.append(("control", ["--speculate=0"]))
    if options.draft is not None:
        drafts = [f"--speculate={options.speculate}", f"--speculative-model={options.draft}"]
        found.append(("weights", drafts))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--starts", type=int, default=2, help="of all servers")
    parser.add_argument("--rounds", type=int, default=2, help="after each start")
    parser.add_argument("--peer-rounds", type=int, default=1, help="of these, with the peers")
    parser.add_argument("--minutes", type=float, help="what is left goes to further rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speculate", default="auto")
    parser.add_argument(
        "--control", type=int, nargs="*", help="a second server without drafts, for these clients"
    )
    parser.add_argument("--draft", type=Path, help="weights that draft: a third server has them")
    parser.add_argument("--llama", type=Path, help="build folder of llama.cpp")
    parser.add_argument(
        "--llama-drafts", nargs="+", choices=LLAMA_DRAFTS, default=["off", "ngram-cache"]
    )
    parser.add_argument("--peer", action="append", default=[], help="URL of a peer")
    parser.add_argument("--serve", nargs="*", default=[], help="extra flags of `tgi serve`: --x=y")
    options = parser.parse_args()
    options.model = options.model.absolute()
    print(description(), flush=True)
    began, clock = time.monotonic(), Clock.read()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(options, Path(folder))
        for number in range(options.starts):
            seconds = None
            if options.minutes is not None:
                end = began + 60 * options.minutes * (number + 1) / options.starts
                seconds = end - time.monotonic()
            run.start(number, seconds)
        report(run.comparison, options)
    idle = run.comparison.idle_seconds / max(1e-9, run.comparison.seconds)
    print(f"\na server that waited used {idle:.2%} of a core, other programs ", end="")
    print(f"{clock.read().foreign_since(clock):.1%} of the machine")
    if run.comparison.different:
        print(f"{run.comparison.different} answers of our servers differ from those of `off`")


if __name__ == "__main__":
    main()
