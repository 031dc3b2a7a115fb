"""CPU time per token of each process between a client and the engine, on Ray and without it.

python -m tests.benchmarks.ray_serve [--streams 16] [--tokens 200] [--rounds 4]

Two replicas of the bundled model on this machine, and a server of one on half of its cores with
half of the streams. Wall times say nothing on a busy one, CPU times do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.tools.process_tree import command_of, descendants_of
from tests.tools.server_process import ServerProcess, free_ports

ROLES = {
    " model-server ": "engine",
    "ray::ServeReplica:tgi:engine": "replica",
    "ray::ServeReplica:tgi:front": "front",
    "ray::ProxyActor": "proxy",
    "ray::ServeController": "controller",
    "raylet": "raylet",
    "gcs_server": "gcs",
    " router ": "router",
}
"""Roles of processes by a part of their command lines."""
START_SECONDS = 300.0


def cpu_seconds(server: ServerProcess) -> Counter[str]:
    """CPU time so far by role."""
    found: Counter[str] = Counter()
    for pid in descendants_of(server.process.pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            command = command_of(pid)
            role = next((role for part, role in ROLES.items() if part in command), "other")
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[role] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def run_streams(url: str, streams: int, tokens: int) -> tuple[int, int]:
    """Run streams at once; returns the numbers of tokens and of pieces in which they came."""

    def stream(number: int) -> tuple[int, int]:
        body = {
            "prompt": f"def function_{number}(",
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        used = pieces = 0
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
            for piece in answer.iter_raw():
                pieces += 1
                for line in piece.split(b"\n"):
                    if b'"usage":{' in line and line.startswith(b"data: {"):
                        used = json.loads(line[6:])["usage"]["completion_tokens"]
        return used, pieces

    with ThreadPoolExecutor(streams) as pool:
        found = list(pool.map(stream, range(streams)))
    return sum(used for used, _ in found), sum(pieces for _, pieces in found)


def measure(
    name: str, start: Callable[[Path], ServerProcess], streams: int, given: argparse.Namespace
) -> None:
    """Print the CPU time per token of one deployment."""
    with tempfile.TemporaryDirectory(prefix="tgi-ray-") as base:
        server = start(Path(base) / "server")
        try:
            server.wait_ready(START_SECONDS)
            run_streams(server.url, streams, 20)
            before, began = cpu_seconds(server), time.monotonic()
            rounds = [run_streams(server.url, streams, given.tokens) for _ in range(given.rounds)]
            seconds = time.monotonic() - began
            used = cpu_seconds(server)
            used.subtract(before)
        finally:
            server.process.terminate()
            server.wait()
    tokens = sum(each for each, _ in rounds)
    pieces = sum(each for _, each in rounds)
    parts = ", ".join(f"{role} {1e6 * cpu / tokens:.0f}" for role, cpu in used.most_common())
    print(
        f"{name}: {tokens} tokens in {pieces} pieces, {seconds:.1f} s; us of CPU per token: {parts}"
    )


def main() -> None:
    """Measure with and without Ray."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", choices=("ray", "replicas", "one"))
    given = parser.parse_args()
    host, two = ("--hostname", "127.0.0.1"), ("--replicas", "2")

    def on_ray(folder: Path) -> ServerProcess:
        (port,) = free_ports(1)
        words = [*host, *two, "--port", str(port), "--cpus", "2", "--replica-cpus", "1"]
        return ServerProcess(folder, ["deploy", "ray", *words])

    def replicas(folder: Path) -> ServerProcess:
        return ServerProcess(folder, ["serve", *host, *two, "--port", "0"])

    def one(folder: Path) -> ServerProcess:
        cores = sorted(os.sched_getaffinity(0))
        half = ",".join(map(str, cores[: max(1, len(cores) // 2)]))
        words = ["serve", *host, "--port", "0"]
        return ServerProcess(folder, words, prefix=["taskset", "--cpu-list", half])

    for kind, name, start, streams in (
        ("ray", "tgi deploy ray --replicas 2", on_ray, given.streams),
        ("replicas", "tgi serve --replicas 2", replicas, given.streams),
        ("one", "tgi serve, half of the cores and streams", one, given.streams // 2),
    ):
        if given.only in (None, kind):
            measure(name, start, streams, given)


if __name__ == "__main__":
    main()
