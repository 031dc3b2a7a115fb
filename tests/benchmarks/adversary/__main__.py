"""Measure the worst request, checkpoint and flag that the server accepts.

    python -m tests.benchmarks.adversary [--only requests] [--route /v1/chat] [--json FILE]

For each field of each request schema, send the longest, most numerous, most deeply nested and most
unusual values that the payload limit allows; for each connection, send malformed and excessive
HTTP. Meanwhile, one process polls /health every 2 ms, another reads a stream, and the memory of
every server process is sampled. For models, send odd names, paths and headers, loads and unloads to
a server of several models. For checkpoints, try extreme values of each field of each file; for
families, of each further field of their config.json; for gguf, of each key, and of the tensors and
the bytes of GGUF files; for images, of each field of image processors; for flags, the extremes of
each flag. Each start has its own limits of CPU time and memory.

The budget: /health responds at most 50 ms later than on an idle server, no process grows by more
than 64 MB beyond the size of the response, no response blames the server for the request, and no
process dies. Load from other programs is excluded: the time that the router and the probe spend
waiting for a CPU is subtracted from each /health latency, and a case that exceeds the budget runs
up to three times; a start of the server that is late is also compared with a normal one right
after it. Exits with status 1 if any case exceeds the budget.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from tests.benchmarks.adversary import report, several_models
from tests.benchmarks.adversary.measure import Bench, Budget, Result
from tests.benchmarks.adversary.server import KEY, Server

STARTS = ("checkpoints", "families", "gguf", "images", "flags")
PARTS = ("requests", "protocol", "models", *STARTS)


def requests(options: argparse.Namespace, parts: list[str]) -> list[Result]:
    """Run the parts that need a server."""
    began = time.monotonic()
    server = Server(options.url, options.pid, options.key, options.serve)
    budget = Budget(options.stall / 1e3, options.growth << 20)
    bench = Bench(server, budget, options.seconds, options.payload_limit, options.guard << 20)
    try:
        bench.measure_idle()
        bench.run(
            lambda case: "requests" in parts and options.route in case,
            "protocol" in parts,
        )
    except KeyboardInterrupt:
        print("interrupted; showing the results so far", file=sys.stderr)
    finally:
        bench.close()
        server.close()
    report.show(report.HEAD, report.rows(bench.results), "The worst field of each route")
    report.show_violations(bench.results)
    idle = bench.idle
    print(
        f"\nidle server: /health within {idle.stall * 1e3:.1f} ms ({idle.raw_stall * 1e3:.1f} with "
        f"CPU waits), stream gaps within {idle.gap * 1e3:.0f} ms"
    )
    print(f"{report.summary(bench.results)}; {time.monotonic() - began:.0f} s")
    if server.restarts:
        print(f"the server was restarted {server.restarts} times")
    return bench.results


def models(options: argparse.Namespace) -> list[Result]:
    """Run the part that needs a server of several models."""
    began = time.monotonic()
    budget = Budget(options.stall / 1e3, options.growth << 20)
    with tempfile.TemporaryDirectory(prefix="tgi-") as folder:
        flags = several_models.flags(Path(folder), options.payload_limit)
        server = Server(key=options.key, flags=[*flags, *options.serve])
        limits = options.seconds, options.payload_limit, options.guard << 20
        bench = Bench(server, budget, *limits, front=True)
        try:
            several_models.load(bench.client)
            bench.monitor.renew(server.pid)
            bench.measure_idle()
            attacks = several_models.attacks(options.payload_limit)
            wanted = (attack for attack in attacks if options.route in attack.name)
            bench.run_attacks("several models", wanted)
        except KeyboardInterrupt:
            print("interrupted; showing the results so far", file=sys.stderr)
        finally:
            bench.close()
            server.close()
    report.show(report.HEAD, report.rows(bench.results), "The front of several models")
    report.show_violations(bench.results)
    print(f"\nidle server: /health within {bench.idle.stall * 1e3:.1f} ms")
    print(f"{report.summary(bench.results)}; {time.monotonic() - began:.0f} s")
    return bench.results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="", help="URL of a running server [start one]")
    parser.add_argument("--pid", type=int, default=0, help="process ID of that server's launcher")
    parser.add_argument("--key", default=KEY, help="API key")
    parser.add_argument(
        "--only", choices=PARTS, action="append", help="part to run; repeatable [all]"
    )
    parser.add_argument(
        "--route",
        default="",
        help="only cases whose route, file, flag, field or kind contains this text",
    )
    parser.add_argument(
        "--payload-limit", type=int, default=2_000_000, help="largest body in bytes"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="timeout of a request")
    parser.add_argument(
        "--stall", type=float, default=50.0, help="budget for /health in milliseconds"
    )
    parser.add_argument("--growth", type=int, default=64, help="memory budget per process in MB")
    parser.add_argument(
        "--guard", type=int, default=2000, help="kill a process that grows by this many MB"
    )
    parser.add_argument("--serve", nargs="*", default=[], help="extra flags of `tgi serve`: --x=y")
    parser.add_argument("--json", type=Path, help="write all cases to this file")
    options = parser.parse_args()
    # On SIGTERM, stop the server and show the results so far.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parts = options.only or list(PARTS)
    results: list[Result] = []
    if {"requests", "protocol"} & set(parts):
        results += requests(options, parts)
    if "models" in parts and not options.url:
        results += models(options)
    if {*STARTS} & set(parts):
        from tests.benchmarks.adversary import starts

        results += starts.run(parts, lambda name: options.route in name)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    raise SystemExit(any(result.violations for result in results))


if __name__ == "__main__":
    main()
