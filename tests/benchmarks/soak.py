"""Minutes of mixed requests against a small cache: does any process gain memory, files, threads?

    python -m tests.benchmarks.soak [--minutes 10] [--clients 6] [--json FILE]

Streams, chats, grammars, several samples, seeds, stop strings, log-probabilities, requests that
their client leaves, and requests that are refused, from several clients at once, against the
bundled model with a cache of 8,192 tokens. Every few seconds it notes of each process of the
server its memory (Pss: pages that several processes share count in parts), open file descriptors
and threads.

A leak goes on: of each process the medians of the last and of the first third after the first
two minutes are compared, and a line is laid through all samples between. Memory grows when the
medians differ by more than the tolerance and the line rises by more than it; files and threads
when the medians differ by two or more. The exit status is 1 when anything grew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.benchmarks.adversary.report import show
from tests.benchmarks.adversary.server import KEY, Server
from tests.benchmarks.adversary.watch import role_of
from tests.tools.process_tree import descendants_of

FLAGS = ("--max-batch-total-tokens", "8192", "--no-measured-limits", "--max-best-of", "4")
PROMPTS = (
    "def read_json(path):",
    "What is Python?",
    "The function open() returns",
    "Write a haiku about lists, then explain it in detail.",
    "import os\n\nclass Reader:\n" * 20,
)


@dataclass(frozen=True)
class Sample:
    """One process at one time: seconds since the start, bytes, counts."""

    at: float
    memory: int
    files: int
    threads: int


@dataclass(frozen=True)
class Growth:
    """Of one process, after the first minutes.

    Attributes:
        memory: bytes that the last third's median is above the first third's.
        slope: bytes in an hour, of the line through all samples.
        rise: bytes that this line gains from the first to the last of them.
        files, threads: as ``memory``.
    """

    memory: float
    slope: float
    rise: float
    files: float
    threads: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Growth:
        """Raises ValueError for less than six samples: they show nothing."""
        if len(samples) < 6:
            raise ValueError(f"{len(samples)} samples show no growth")
        third = len(samples) // 3
        first, last = samples[:third], samples[-third:]

        def gain(name: str) -> float:
            middle = (statistics.median(getattr(s, name) for s in part) for part in (last, first))
            return next(middle) - next(middle)

        times = [sample.at for sample in samples]
        line = statistics.linear_regression(times, [sample.memory for sample in samples])
        rise = line.slope * (times[-1] - times[0])
        return cls(gain("memory"), line.slope * 3600, rise, gain("files"), gain("threads"))

    def broken(self, tolerance: float) -> list[str]:
        """What grew; ``tolerance``: bytes of memory that may be noise."""
        found = []
        if self.memory > tolerance and self.rise > tolerance:
            found.append("memory")
        found += [name for name in ("files", "threads") if getattr(self, name) >= 2]
        return found


def sample(pid: int, at: float) -> Sample:
    """Raises OSError if the process has ended."""
    folder = Path(f"/proc/{pid}")
    memory = (folder / "smaps_rollup").read_text(encoding="ascii").partition("\nPss:")[2]
    files = sum(1 for _ in (folder / "fd").iterdir())
    threads = sum(1 for _ in (folder / "task").iterdir())
    return Sample(at, int(memory.split()[0]) * 1024, files, threads)


def request(dice: random.Random) -> tuple[str, dict[str, Any], bool]:
    """Path, body, and whether the client leaves before the end."""
    prompt = dice.choice(PROMPTS) + " " * dice.randrange(3)
    tokens = dice.choice((1, 8, 40, 120))
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": dice.choice((0, 1)),
    }
    text = {"prompt": prompt, "max_tokens": tokens}
    native = {"inputs": prompt, "parameters": {"max_new_tokens": tokens}}
    forms: tuple[tuple[str, dict[str, Any], bool], ...] = (
        ("/generate", native, False),
        ("/generate_stream", native, False),
        ("/v1/chat/completions", chat, False),
        ("/v1/chat/completions", chat | {"stream": True}, False),
        ("/v1/chat/completions", chat | {"stream": True, "max_tokens": 500}, True),
        ("/generate", {"inputs": prompt, "parameters": {"max_new_tokens": 500}}, True),
        ("/v1/chat/completions", chat | {"n": 3, "seed": dice.randrange(1000)}, False),
        ("/v1/completions", text | {"logprobs": 5, "stop": ["\n\n", " the"]}, False),
        ("/v1/completions", text | {"echo": True, "logprobs": 1}, False),
        ("/v1/completions", text | {"prompt": [prompt] * 3, "temperature": 1}, False),
        ("/v1/chat/completions", chat | {"guided_regex": f"[a-{dice.choice('xyz')}]+"}, False),
        ("/v1/chat/completions", chat | {"response_format": {"type": "json_object"}}, False),
        ("/v1/chat/completions", chat | {"guided_choice": ["yes", str(dice.random())]}, False),
        ("/v1/responses", {"input": prompt, "max_output_tokens": tokens, "stream": True}, False),
        ("/tokenize", native, False),
        ("/v1/chat/completions", chat | {"temperature": -1}, False),
        ("/v1/completions", text | {"prompt": "a " * 5000}, False),
        ("/v1/completions", {"prompt": 5}, False),
        ("/no/such/path", {}, False),
        ("/v1/chat/completions", chat | {"guided_regex": "["}, False),
    )
    return dice.choice(forms)


class Clients:
    """Send without end, each from a thread of its own."""

    def __init__(self, url: str, key: str, count: int) -> None:
        self.statuses: Counter[str] = Counter()
        self._over = threading.Event()
        self._url, self._key = url, key
        self._threads = [
            threading.Thread(target=self._run, args=(seed,), daemon=True) for seed in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, seed: int) -> None:
        dice = random.Random(seed)
        headers = {"authorization": f"Bearer {self._key}"}
        client = httpx.Client(base_url=self._url, headers=headers, timeout=60)
        while not self._over.is_set():
            path, body, leaves = request(dice)
            if dice.random() < 0.02:  # connections come and go
                client.close()
                client = httpx.Client(base_url=self._url, headers=headers, timeout=60)
            try:
                self.statuses[self._ask(client, path, body, leaves, dice)] += 1
            except httpx.HTTPError as error:
                self.statuses[type(error).__name__] += 1

    def _ask(
        self,
        client: httpx.Client,
        path: str,
        body: dict[str, Any],
        leaves: bool,
        dice: random.Random,
    ) -> str:
        if leaves and path == "/generate":
            with contextlib.suppress(httpx.ReadTimeout):
                client.post(path, json=body, timeout=0.05 + dice.random() * 0.3)
            return "left"
        with client.stream("POST", path, json=body) as answer:
            stop = dice.randrange(1, 20) if leaves else None
            for count, _ in enumerate(answer.iter_raw()):
                if count == stop:
                    return "left"
        return str(answer.status_code)


def watch(root: int, seconds: float, every: float) -> dict[str, list[Sample]]:
    """Samples of each process by role and id, for so long."""
    found: dict[str, list[Sample]] = {}
    began = time.monotonic()
    while (at := time.monotonic() - began) < seconds:
        for pid in (root, *descendants_of(root)):
            with contextlib.suppress(OSError, IndexError):
                found.setdefault(f"{role_of(pid)} {pid}", []).append(sample(pid, at))
        time.sleep(max(every - (time.monotonic() - began - at), 0.1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--settle", type=float, default=2.0, help="minutes that do not count")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two samples")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--tolerance", type=float, default=4.0, help="MB that may be noise")
    parser.add_argument("--json", type=Path, help="write every sample")
    options = parser.parse_args()
    server = Server(flags=FLAGS)
    first = {server.pid, *descendants_of(server.pid)}
    host, port = server.address
    try:
        clients = Clients(f"http://{host}:{port}", KEY, options.clients)
        samples = watch(server.pid, options.minutes * 60, options.every)
        clients.end()
        lost = sorted(first - {server.pid, *descendants_of(server.pid)})
    finally:
        server.close()
    table, broken = [], []
    for name, found in samples.items():
        later = [one for one in found if one.at >= options.settle * 60]
        if len(later) < 6:
            continue  # a worker that has ended since
        growth = Growth.of(later)
        bad = growth.broken(options.tolerance * 2**20)
        broken += [f"{name}: {what}" for what in bad]
        table.append(
            [
                name.rpartition(" ")[0],
                f"{later[0].memory / 2**20:.1f}",
                f"{later[-1].memory / 2**20:.1f}",
                f"{growth.memory / 2**20:+.2f}",
                f"{growth.slope / 2**20:+.1f}",
                f"{growth.files:+.0f}",
                f"{growth.threads:+.0f}",
                ", ".join(bad) or "-",
            ]
        )
    head = ["process", "MB then", "MB at the end", "growth MB", "MB an hour", "files", "threads"]
    show([*head, "grew"], table, f"{options.minutes:g} minutes, after the first {options.settle:g}")
    print(f"\n{sum(clients.statuses.values())} requests: {dict(clients.statuses.most_common())}")
    if lost:
        broken.append(f"processes that ended: {lost}")
    print("; ".join(broken) or "nothing grew")
    if options.json is not None:
        told = {name: [vars(one) for one in found] for name, found in samples.items()}
        options.json.write_text(json.dumps(told))
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
