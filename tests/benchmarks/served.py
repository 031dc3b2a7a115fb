"""Compare streaming speed of server variants over HTTP, and the CPU time of their threads.

    python -m tests.tools.checkpoints --shape 135m --full-tokenizer /tmp/small
    python -m tests.benchmarks.served /tmp/small --streams 1 32 \\
        --variant base --variant passive:OMP_WAIT_POLICY=passive --variant old@/path/to/checkout

A variant is ``NAME[@CHECKOUT][:VARIABLE=VALUE,...]``: another clone of the repository, and extra
environment variables of the server. All servers run throughout; each round sends every variant a
wave, one after the other, so that drifts in the machine's speed affect all equally. A wave is C
concurrent streams of ``/v1/completions`` with prompts of random tokens (no prefix reuse), greedy,
``ignore_eos``. The client reads raw bytes in this process, on the same cores.

``--threads`` also prints the cost of each thread per step in the last wave of each variant: CPU
time and context switches, as counted by the kernel.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.tools.process_tree import children_of, command_of
from tests.tools.server_process import free_ports, stop


@dataclass(frozen=True)
class Wave:
    """Output tokens per second, and medians over the streams in seconds: TTFT and ITL."""

    rate: float
    ttft: float
    itl: float


@dataclass
class Threads:
    """CPU microseconds, voluntary and involuntary context switches, by thread name and ID."""

    cpu: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    voluntary: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    involuntary: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @classmethod
    def of(cls, roles: dict[str, int]) -> Threads:
        now = cls()
        for role, pid in roles.items():
            tasks = Path(f"/proc/{pid}/task").iterdir()
            for task in tasks:
                try:
                    status = (task / "status").read_text()
                    nanoseconds = int((task / "schedstat").read_text().split()[0])
                except OSError:  # it has ended
                    continue
                values = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
                name = f"{role}: {values['Name'].strip()} {task.name}"
                now.cpu[name] += nanoseconds / 1e3
                now.voluntary[name] += int(values["voluntary_ctxt_switches"])
                now.involuntary[name] += int(values["nonvoluntary_ctxt_switches"])
        return now

    def since(self, before: Threads, steps: int) -> list[tuple[str, float, float, float]]:
        """Return name, CPU us and both kinds of switches per step, by descending CPU time."""
        rows = [
            (
                name,
                (cpu - before.cpu.get(name, 0.0)) / steps,
                (self.voluntary[name] - before.voluntary.get(name, 0)) / steps,
                (self.involuntary[name] - before.involuntary.get(name, 0)) / steps,
            )
            for name, cpu in self.cpu.items()
        ]
        return sorted((row for row in rows if row[1] >= 0.5), key=lambda row: -row[1])


class Variant:
    """A server process and its measurements."""

    def __init__(self, variant: str, model: Path, extra: Iterable[str]) -> None:
        head, _, variables = variant.partition(":")
        self.name, _, checkout = head.partition("@")
        self.waves: dict[int, list[Wave]] = defaultdict(list)
        self.profile: dict[int, list[tuple[str, float, float, float]]] = {}
        [self.port] = free_ports(1)
        environment = dict(os.environ)
        environment["PYTHONPATH"] = checkout or str(Path.cwd())
        environment |= dict(pair.split("=", 1) for pair in variables.split(",") if pair)
        command = [sys.executable, "-m", "tgi_cli", "serve", str(model), *extra]
        command += ["--port", str(self.port), "--hostname", "127.0.0.1", "--no-prefix-caching"]
        command += ["--logger-level", "error", "--json-output"]
        self._process = subprocess.Popen(command, env=environment, cwd=checkout or None)

    def wait_until_ready(self) -> None:
        end = time.monotonic() + 300
        while time.monotonic() < end and self._process.poll() is None:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                    connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                    if b" 200 " in connection.recv(100):
                        return
            except OSError:
                pass
            time.sleep(0.1)
        raise RuntimeError(f"{self.name} did not start")

    @property
    def processes(self) -> dict[str, int]:
        """Process IDs of the launcher, the model server and the router."""
        roles = {"launcher": self._process.pid}
        for child in children_of(self._process.pid):
            roles["router" if " router " in command_of(child) else "server"] = child
        return roles

    def wave(self, streams: int, prompts: list[list[int]], new_tokens: int) -> Wave:
        return asyncio.run(self._wave(prompts, new_tokens))

    async def _wave(self, prompts: list[list[int]], new_tokens: int) -> Wave:
        firsts: list[float] = []
        itl: list[float] = []
        begin = time.perf_counter()

        async def one(prompt: list[int]) -> None:
            body = {
                "model": "x",
                "prompt": prompt,
                "max_tokens": new_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            content = json.dumps(body).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
                % len(content)
                + content
            )
            status = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in status:
                raise RuntimeError(status.decode() + (await reader.read()).decode())
            text = await reader.readuntil(b"data:")
            first = time.perf_counter()
            firsts.append(first - begin)
            while chunk := await reader.read(1 << 16):
                text += chunk
            itl.append((time.perf_counter() - first) / (new_tokens - 1))
            writer.close()
            if b'"completion_tokens":%d' % new_tokens not in text:
                raise RuntimeError(f"not {new_tokens} tokens: {text[-300:].decode()}")

        await asyncio.gather(*map(one, prompts))
        rate = len(prompts) * new_tokens / (time.perf_counter() - begin)
        return Wave(rate, statistics.median(firsts), statistics.median(itl))

    def close(self) -> None:
        stop(self._process, 30)


def measure(variants: list[Variant], options: argparse.Namespace) -> None:
    vocab = json.loads((options.model / "config.json").read_text())["vocab_size"]
    generator = random.Random(0)
    for streams in options.streams:
        for number in range(options.rounds + 1):  # the first warms up
            for variant in variants[number % len(variants) :] + variants[: number % len(variants)]:
                prompts = [
                    [generator.randrange(10, vocab) for _ in range(options.prompt_tokens)]
                    for _ in range(streams)
                ]
                before = Threads.of(variant.processes)
                wave = variant.wave(streams, prompts, options.new_tokens)
                if number:
                    variant.waves[streams].append(wave)
                    after = Threads.of(variant.processes)
                    variant.profile[streams] = after.since(before, options.new_tokens)


def report(variants: list[Variant], options: argparse.Namespace) -> None:
    first = variants[0]
    print("| streams | variant | output tok/s (min-max) | vs first | TTFT ms | ITL ms |")
    print("|---|---|---|---|---|---|")
    for streams in options.streams:
        base = statistics.median(wave.rate for wave in first.waves[streams])
        for variant in variants:
            waves = variant.waves[streams]
            rates = sorted(wave.rate for wave in waves)
            middle = statistics.median(rates)
            itl = statistics.median(wave.itl for wave in waves) * 1e3
            ttft = statistics.median(wave.ttft for wave in waves) * 1e3
            print(
                f"| {streams} | {variant.name} | {middle:.1f} ({rates[0]:.1f}-{rates[-1]:.1f}) "
                f"| {middle / base:.3f} | {ttft:.0f} | {itl:.2f} |"
            )
    if not options.threads:
        return
    print("\n| streams | variant | thread | CPU us/step | voluntary switches | involuntary |")
    print("|---|---|---|---|---|---|")
    for streams in options.streams:
        for variant in variants:
            for name, cpu, voluntary, involuntary in variant.profile[streams]:
                print(
                    f"| {streams} | {variant.name} | {name} | {cpu:.0f} | {voluntary:.2f} "
                    f"| {involuntary:.2f} |"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--variant", action="append", help="NAME[@CHECKOUT][:VARIABLE=VALUE,...]")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", action="store_true")
    parser.add_argument("--serve", nargs="*", default=[], help="extra flags of `tgi serve`: --x=y")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # stop the servers, too
    variants: list[Variant] = []
    try:
        for text in options.variant or ["base"]:
            variants.append(Variant(text, options.model, options.serve))
        for variant in variants:
            variant.wait_until_ready()
        measure(variants, options)
        report(variants, options)
    finally:
        for variant in variants:
            variant.close()


if __name__ == "__main__":
    main()
