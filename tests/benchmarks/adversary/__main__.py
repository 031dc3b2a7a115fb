"""What the worst request, checkpoint and flag cost, within what the server accepts.

    python -m tests.benchmarks.adversary [--only requests] [--route /v1/chat] [--json FILE]

For each field of each schema of each route it sends values that are as long, as many, as deep and
as odd as the payload limit allows; for each connection, malformed and excessive HTTP. Meanwhile
a process asks for /health every 2 ms, another one reads a stream, and the memory of each of the
server's processes is looked at. For checkpoints, absurd values of each field of each file; for
flags, of each numeric flag: each start has a time and a memory of its own.

The budget: /health within 50 ms of what the quiet server needs, no process 64 MB larger than the
answer makes it, no answer that blames the server for the request, nothing killed. Times of others
on the machine do not count: of an answer to /health what the router and the probe waited for a
processor is subtracted, and a case that broke the budget is run up to three times. The exit
status is 1 if the budget was broken.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from tests.benchmarks.adversary import report
from tests.benchmarks.adversary.measure import Bench, Budget, Result
from tests.benchmarks.adversary.server import KEY, Server

PARTS = ("requests", "protocol", "checkpoints", "flags")


def requests(options: argparse.Namespace, parts: list[str]) -> list[Result]:
    """The parts that need a server."""
    began = time.monotonic()
    server = Server(options.url, options.pid, options.key, options.serve)
    budget = Budget(options.stall / 1e3, options.growth << 20)
    bench = Bench(server, budget, options.seconds, options.payload_limit, options.guard << 20)
    try:
        bench.rest()
        bench.run(
            lambda case: "requests" in parts and options.route in case,
            "protocol" in parts,
        )
    except KeyboardInterrupt:
        print("interrupted: this is what was measured until then", file=sys.stderr)
    finally:
        bench.close()
        server.close()
    report.show(report.HEAD, report.rows(bench.results), "The worst field of each route")
    report.show_broken(bench.results)
    quiet = bench.quiet
    print(
        f"\nquiet: /health within {quiet.stall * 1e3:.1f} ms ({quiet.raw_stall * 1e3:.1f} with "
        f"others' time), gaps within {quiet.gap * 1e3:.0f} ms"
    )
    print(f"{report.summary(bench.results)}; {time.monotonic() - began:.0f} s")
    if server.restarts:
        print(f"the server was started again {server.restarts} times")
    return bench.results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="", help="of a server that runs; else one is started")
    parser.add_argument("--pid", type=int, default=0, help="of that server's launcher")
    parser.add_argument("--key", default=KEY, help="of its API")
    parser.add_argument("--only", choices=PARTS, action="append", help="parts; else all")
    parser.add_argument(
        "--route",
        default="",
        help="only cases whose route, file, flag, field or kind contains this",
    )
    parser.add_argument("--payload-limit", type=int, default=2_000_000, help="bytes of a body")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a request, at most")
    parser.add_argument("--stall", type=float, default=50.0, help="budget in milliseconds")
    parser.add_argument("--growth", type=int, default=64, help="budget in MB")
    parser.add_argument("--guard", type=int, default=2000, help="MB at which a process is ended")
    parser.add_argument("--serve", nargs="*", default=[], help="more of `tgi serve`: --x=y")
    parser.add_argument("--json", type=Path, help="write every case")
    options = parser.parse_args()
    # No server is left behind, and what was measured is shown.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parts = options.only or list(PARTS)
    results: list[Result] = []
    if {"requests", "protocol"} & set(parts):
        results += requests(options, parts)
    if {"checkpoints", "flags"} & set(parts):
        from tests.benchmarks.adversary import starts

        results += starts.run(parts, lambda name: options.route in name)
    if options.json is not None:
        options.json.write_text(json.dumps([one.told() for one in results], indent=1))
    raise SystemExit(any(one.broken for one in results))


if __name__ == "__main__":
    main()
