"""Find leaks: send mixed requests for minutes, and measure memory, files and threads.

    python -m tests.benchmarks.soak [--minutes 10] [--clients 6] [--json FILE]

Several clients at once send streams, chats, grammars, several samples, seeds, stop strings,
log-probabilities, requests that they abandon and invalid requests to the bundled model with a KV
cache of 8,192 tokens. Every few seconds, sample the memory (Pss, in which shared pages are divided
among their processes), open file descriptors and threads of every process of the server.

The first two minutes are ignored. Of the samples after them, compare each process's medians of the
first and the last third, and fit a line. Memory has grown if both the medians and the line differ
by more than the tolerance, files and threads if their medians differ by two or more. Exits with
status 1 if anything has grown.
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

from tests.benchmarks.adversary.monitor import role_of
from tests.benchmarks.adversary.report import show
from tests.benchmarks.adversary.server import KEY, Server
from tests.tools.process_tree import descendants_of

FLAGS = (
    *("--max-batch-total-tokens", "8192", "--no-measured-limits", "--max-best-of", "4"),
    # Full within the first two minutes; its growth to the default size is no leak.
    *("--response-store-bytes", "200000"),
)
PROMPTS = (
    "def read_json(path):",
    "What is Python?",
    "The function open() returns",
    "Write a haiku about lists, then explain it in detail.",
    "import os\n\nclass Reader:\n" * 20,
)


@dataclass(frozen=True)
class Sample:
    """A sample of one process: seconds since the start, bytes of memory, counts."""

    at: float
    memory: int
    files: int
    threads: int


@dataclass(frozen=True)
class Growth:
    """Growth of one process after the first minutes.

    Attributes:
        memory: difference in bytes between the medians of the last and the first third.
        slope: bytes per hour, by linear regression over all samples.
        rise: bytes that the regression line gains from the first to the last sample.
        files, threads: differences of the medians, as for ``memory``.
    """

    memory: float
    slope: float
    rise: float
    files: float
    threads: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Growth:
        """Compute the growth, or raise ValueError for fewer than six samples."""
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

    def grown(self, tolerance: float) -> list[str]:
        """Return the names of what has grown, memory by more than ``tolerance`` bytes."""
        found = []
        if self.memory > tolerance and self.rise > tolerance:
            found.append("memory")
        found += [name for name in ("files", "threads") if getattr(self, name) >= 2]
        return found


def sample(pid: int, at: float) -> Sample:
    """Take a sample of a process, or raise OSError if it has ended."""
    folder = Path(f"/proc/{pid}")
    memory = (folder / "smaps_rollup").read_text(encoding="ascii").partition("\nPss:")[2]
    files = sum(1 for _ in (folder / "fd").iterdir())
    threads = sum(1 for _ in (folder / "task").iterdir())
    return Sample(at, int(memory.split()[0]) * 1024, files, threads)


def request(generator: random.Random) -> tuple[str, dict[str, Any], bool]:
    """Return path, body, and whether the client abandons the request."""
    prompt = generator.choice(PROMPTS) + " " * generator.randrange(3)
    tokens = generator.choice((1, 8, 40, 120))
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": generator.choice((0, 1)),
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
        ("/v1/chat/completions", chat | {"n": 3, "seed": generator.randrange(1000)}, False),
        ("/v1/completions", text | {"logprobs": 5, "stop": ["\n\n", " the"]}, False),
        ("/v1/completions", text | {"echo": True, "logprobs": 1}, False),
        ("/v1/completions", text | {"prompt": [prompt] * 3, "temperature": 1}, False),
        ("/v1/chat/completions", chat | {"guided_regex": f"[a-{generator.choice('xyz')}]+"}, False),
        ("/v1/chat/completions", chat | {"response_format": {"type": "json_object"}}, False),
        ("/v1/chat/completions", chat | {"guided_choice": ["yes", str(generator.random())]}, False),
        ("/v1/responses", {"input": prompt, "max_output_tokens": tokens, "stream": True}, False),
        ("/tokenize", native, False),
        ("/v1/chat/completions", chat | {"temperature": -1}, False),
        ("/v1/completions", text | {"prompt": "a " * 5000}, False),
        ("/v1/completions", {"prompt": 5}, False),
        ("/no/such/path", {}, False),
        ("/v1/chat/completions", chat | {"guided_regex": "["}, False),
    )
    return generator.choice(forms)


class Clients:
    """Clients that send requests until they are stopped, each in its own thread."""

    def __init__(self, url: str, key: str, count: int) -> None:
        self.statuses: Counter[str] = Counter()
        self._stopped = threading.Event()
        self._url, self._key = url, key
        self._threads = [
            threading.Thread(target=self._run, args=(seed,), daemon=True) for seed in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, seed: int) -> None:
        generator = random.Random(seed)
        headers = {"authorization": f"Bearer {self._key}"}
        client = httpx.Client(base_url=self._url, headers=headers, timeout=60)
        while not self._stopped.is_set():
            path, body, abandoned = request(generator)
            if generator.random() < 0.02:  # connections come and go
                client.close()
                client = httpx.Client(base_url=self._url, headers=headers, timeout=60)
            try:
                self.statuses[self._send(client, path, body, abandoned, generator)] += 1
            except httpx.HTTPError as error:
                self.statuses[type(error).__name__] += 1

    def _send(
        self,
        client: httpx.Client,
        path: str,
        body: dict[str, Any],
        abandoned: bool,
        generator: random.Random,
    ) -> str:
        if abandoned and path == "/generate":
            with contextlib.suppress(httpx.ReadTimeout):
                client.post(path, json=body, timeout=0.05 + generator.random() * 0.3)
            return "abandoned"
        with client.stream("POST", path, json=body) as answer:
            stop = generator.randrange(1, 20) if abandoned else None
            for count, _ in enumerate(answer.iter_raw()):
                if count == stop:
                    return "abandoned"
        return str(answer.status_code)


def collect(root: int, seconds: float, interval: float) -> dict[str, list[Sample]]:
    """Sample every process for ``seconds``; return the samples by role and process ID."""
    found: dict[str, list[Sample]] = {}
    began = time.monotonic()
    while (at := time.monotonic() - began) < seconds:
        for pid in (root, *descendants_of(root)):
            with contextlib.suppress(OSError, IndexError):
                found.setdefault(f"{role_of(pid)} {pid}", []).append(sample(pid, at))
        time.sleep(max(interval - (time.monotonic() - began - at), 0.1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--settle", type=float, default=2.0, help="minutes to ignore at the start")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two samples")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--tolerance", type=float, default=4.0, help="MB of growth to ignore")
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    options = parser.parse_args()
    server = Server(flags=FLAGS)
    first = {server.pid, *descendants_of(server.pid)}
    host, port = server.address
    try:
        clients = Clients(f"http://{host}:{port}", KEY, options.clients)
        samples = collect(server.pid, options.minutes * 60, options.every)
        clients.stop()
        lost = sorted(first - {server.pid, *descendants_of(server.pid)})
    finally:
        server.close()
    table, failures = [], []
    for name, found in samples.items():
        later = [one for one in found if one.at >= options.settle * 60]
        if len(later) < 6:
            continue  # a worker that has ended since
        growth = Growth.of(later)
        grown = growth.grown(options.tolerance * 2**20)
        failures += [f"{name}: {what}" for what in grown]
        table.append(
            [
                name.rpartition(" ")[0],
                f"{later[0].memory / 2**20:.1f}",
                f"{later[-1].memory / 2**20:.1f}",
                f"{growth.memory / 2**20:+.2f}",
                f"{growth.slope / 2**20:+.1f}",
                f"{growth.files:+.0f}",
                f"{growth.threads:+.0f}",
                ", ".join(grown) or "-",
            ]
        )
    head = [
        "process",
        "MB at first",
        "MB at the end",
        "growth MB",
        "MB an hour",
        "files",
        "threads",
    ]
    show([*head, "grew"], table, f"{options.minutes:g} minutes, after the first {options.settle:g}")
    print(f"\n{sum(clients.statuses.values())} requests: {dict(clients.statuses.most_common())}")
    if lost:
        failures.append(f"processes that ended: {lost}")
    print("; ".join(failures) or "nothing grew")
    if options.json is not None:
        dumped = {name: [vars(one) for one in found] for name, found in samples.items()}
        options.json.write_text(json.dumps(dumped))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
