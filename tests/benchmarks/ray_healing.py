"""How long Ray Serve takes to replace a killed replica, by phases, and the CPU time of each.

python -m tests.benchmarks.ray_healing [--rounds 3]

Two replicas of the bundled model on this machine. On a busy one, phases last as long as the
processes take to get their CPU time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.benchmarks.ray_serve import START_SECONDS
from tests.tools.process_tree import command_of, descendants_of
from tests.tools.server_process import ServerProcess, free_ports, kill

REPLICA = "ray::ServeReplica:tgi:engine"
ENGINE = " model-server "
WARM, READY = "warmed up in", ": ready in"
"""In the log lines of a model server and of a replica."""
PHASES = (
    "Ray starts another replica's process",
    "it begins to load (Ray's imports)",
    "it starts the model server",
    "the model server has warmed up",
    "the replica is ready",
    "the fronts know it",
)


def find(server: ServerProcess, part: str) -> set[int]:
    """Processes of the deployment by a part of their command lines."""
    found = set()
    for pid in descendants_of(server.process.pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if part in command_of(pid):
                found.add(pid)
    return found


def stat_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = stat_of(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def started(pid: int) -> float:
    """When a process began, in ``time.monotonic()``, which counts from boot here."""
    return int(stat_of(pid)[19]) / os.sysconf("SC_CLK_TCK")


def wait_for(condition: Callable[[], object]) -> float:
    """The moment from which a condition holds."""
    end = time.monotonic() + START_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
    return time.monotonic()


def heal(server: ServerProcess) -> tuple[list[float], dict[str, float]]:
    """Kill a replica; the seconds after that at which phases began, and CPU times."""

    def replicas() -> set[str]:
        answer = httpx.get(f"{server.url}/metrics", timeout=30).text
        head = 'tgi_queue_size{replica="'
        return {line.partition('"')[2][:8] for line in answer.splitlines() if head in line}

    wait_for(lambda: len(find(server, ENGINE)) == 2 and len(replicas()) == 2)
    old, engines, known = find(server, REPLICA), find(server, ENGINE), replicas()
    warm, ready = server.log.count(WARM), server.log.count(READY)
    began = time.monotonic()
    kill(min(old))
    loads = wait_for(lambda: find(server, REPLICA) - old)
    (replica,) = find(server, REPLICA) - old
    starts = wait_for(lambda: find(server, ENGINE) - engines)
    (engine,) = find(server, ENGINE) - engines
    imports = cpu_of(replica)
    serves = wait_for(lambda: server.log.count(WARM) > warm)
    loaded = cpu_of(engine)
    is_ready = wait_for(lambda: server.log.count(READY) > ready)
    routed = wait_for(lambda: replicas() - known)
    cpu = {"replica before": imports, "model server": loaded, "replica": cpu_of(replica)}
    moments = [started(replica), loads, starts, serves, is_ready, routed]
    return [moment - began for moment in moments], cpu


def main() -> None:
    """Measure several rounds; prints medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    (port,) = free_ports(1)
    words = ["--hostname", "127.0.0.1", "--port", str(port), "--replicas", "2"]
    with tempfile.TemporaryDirectory(prefix="tgi-ray-") as base:
        folder = Path(base) / "server"
        server = ServerProcess(
            folder, ["deploy", "ray", *words, "--cpus", "2", "--replica-cpus", "1"]
        )
        try:
            server.wait_ready(START_SECONDS)
            rounds = [heal(server) for _ in range(given.rounds)]
        finally:
            server.process.terminate()
            server.wait()
    print(f"load {os.getloadavg()[0]:.1f}; seconds after the kill, medians of {given.rounds}")
    for index, phase in enumerate(PHASES):
        times = [moments[index] for moments, _ in rounds]
        print(
            f"| {phase} | {statistics.median(times):.1f} | {min(times):.1f} to {max(times):.1f} |"
        )
    for name in rounds[0][1]:
        cpus = [cpu[name] for _, cpu in rounds]
        print(f"CPU seconds, {name}: {statistics.median(cpus):.1f}")


if __name__ == "__main__":
    main()
