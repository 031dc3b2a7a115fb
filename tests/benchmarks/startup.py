"""Measure the startup time of a server, cold and warm, and the CPU time of ``tgi --help``.

    python -m tests.tools.checkpoints --shape 135m --full-tokenizer /tmp/135m
    python -m tests.benchmarks.startup --model bundled --model /tmp/135m --rounds 5

A server is ready at the first 200 of ``/health``, which is polled every 10 ms; its memory is the
sum of what its processes have taken at most (VmHWM) until then. A model may be a GGUF file, too.
For a cold start, the files of the checkpoint and of all packages that the interpreter may import
are dropped from the page cache first (posix_fadvise DONTNEED; files that another process has mapped
stay). ``--variant NAME:FLAGS`` adds starts with extra flags, alternating with the others; the gain
of ``tgi warmup`` is shown by ``--variant cached: --variant measured:--no-measured-limits``.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.benchmarks.peers import machine
from tests.tools.server_process import free_ports, stop

_READY_SECONDS = 300.0
_HELP_ROUNDS = 15
_TGI = (sys.executable, "-m", "tgi_cli")


def files_of(model: str) -> list[Path]:
    """Return the files of the checkpoint and of all packages that a server may import."""
    folders = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")}
    folders.add(Path(__file__).resolve().parents[2] / "tgi_cli")
    folders.update([] if model == "bundled" else [Path(model)])
    found = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [*found, *(file for file in folders if file.is_file())]


def drop(files: Iterable[Path]) -> None:
    """Drop files from the page cache, so that they are read from disk again."""
    os.sync()  # dirty pages cannot be dropped
    for path in files:
        with contextlib.suppress(OSError):  # not ours to read
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class Server:
    """A ``tgi serve``, timed from before its process starts."""

    def __init__(self, model: str, extra: Sequence[str]) -> None:
        [self._port] = free_ports(1)
        named = [] if model == "bundled" else [model]
        address = ["--hostname", "127.0.0.1", "--port", str(self._port)]
        self._began = time.perf_counter()
        self._process = subprocess.Popen(
            [*_TGI, "serve", *named, *address, "--logger-level", "error", "--json-output", *extra],
            stdout=subprocess.DEVNULL,
        )

    def ready(self) -> float:
        """Wait until it is ready; return the seconds since the start."""
        while time.perf_counter() - self._began < _READY_SECONDS:
            if self._process.poll() is not None:
                raise SystemExit(f"the server exited with {self._process.returncode}")
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return time.perf_counter() - self._began
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.01)
        raise SystemExit("the server did not become ready")

    def peak_memory(self) -> float:
        """Return the sum of the most memory that each of its processes has had, in MB."""
        return machine.memory(self._process.pid).peak

    def close(self) -> None:
        stop(self._process, 30)


def start(model: str, dropped: Iterable[Path], extra: Sequence[str]) -> tuple[float, float, float]:
    """Start and stop a server; return its seconds until it was ready, CPU seconds and MB."""
    drop(dropped)
    before = cpu_so_far()
    server = Server(model, extra)
    try:
        seconds = server.ready()
        megabytes = server.peak_memory()
    finally:
        server.close()
    return seconds, cpu_so_far() - before, megabytes


def cpu_so_far() -> float:
    """Return user and system time of all child processes that have exited."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_seconds(command: Sequence[str]) -> float:
    """Return the CPU seconds of a command."""
    before = cpu_so_far()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return cpu_so_far() - before


def summary(values: Sequence[float]) -> dict[str, float]:
    """Summarize the values of all rounds."""
    return {
        "median": statistics.median(values),
        "least": min(values),
        "most": max(values),
        "rounds": len(values),
    }


def help_times() -> dict[str, dict[str, float]]:
    """Return the CPU seconds of ``tgi --help`` and of a bare interpreter, in turns."""
    times: dict[str, list[float]] = {"tgi --help": [], "python -c pass": []}
    commands = {"tgi --help": [*_TGI, "--help"], "python -c pass": [sys.executable, "-c", "pass"]}
    for number in range(_HELP_ROUNDS + 1):
        for name, command in commands.items():
            seconds = cpu_seconds(command)
            if number:
                times[name].append(seconds)
    return {name: summary(values) for name, values in times.items()}


def measure(
    models: Sequence[str], rounds: int, variants: dict[str, list[str]]
) -> dict[str, dict[str, float]]:
    """Return the seconds until ready by model, page cache and variant, which take turns."""
    taken: dict[str, list[float]] = {}
    files = {model: files_of(model) for model in models}
    for number in range(rounds + 1):
        for model in models:
            for variant, extra in variants.items():
                for cold in (True, False):
                    seconds, cpu, memory = start(model, files[model] if cold else (), extra)
                    if number:  # the first one fills caches on disk
                        state = "cold" if cold else "warm"
                        name = ", ".join(filter(None, (Path(model).name, state, variant)))
                        taken.setdefault(name, []).append(seconds)
                        taken.setdefault(f"{name}: CPU", []).append(cpu)
                        taken.setdefault(f"{name}: MB", []).append(memory)
    return {name: summary(values) for name, values in taken.items()}


def table(title: str, rows: dict[str, dict[str, float]]) -> None:
    print(f"\n| {title} | median | least | most | rounds |\n|---|---|---|---|---|")
    for name, row in rows.items():
        print(
            f"| {name} | {row['median']:.3f} | {row['least']:.3f} | {row['most']:.3f} "
            f"| {row['rounds']} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", help="a checkpoint, or `bundled`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variant", action="append", help="NAME:FLAGS of `tgi serve`")
    parser.add_argument("--skip-help", action="store_true", help="measure only starts")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # stop the server, too
    named = (each.partition(":") for each in options.variant or [":"])
    variants = {name: shlex.split(flags) for name, _, flags in named}
    found: dict[str, dict[str, dict[str, float]]] = {}
    tasks: dict[str, Callable[[], dict[str, dict[str, float]]]] = {
        "startup": lambda: measure(options.model or ["bundled"], options.rounds, variants)
    }
    if not options.skip_help:
        tasks["CPU time"] = help_times
    for title, task in tasks.items():
        found[title] = task()
        table(title, found[title])
    print()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
