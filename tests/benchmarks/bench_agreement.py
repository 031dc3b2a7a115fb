"""Compare ``tgi bench`` with other load generators: ``python -m tests.benchmarks.bench_agreement``.

Prints three tables:

- agreement: one server, measured in turns by ``tgi bench``, by a short script
  (tests/tools/httpx_load.py) and by guidellm, if ``--guidellm PYTHON`` is the interpreter of an
  environment with it. Without ``--url``, serve the bundled model.
- repetition: the same server compared with itself, ``--rounds`` times. No regression must be
  reported.
- regression: the same server behind a proxy that makes each response 10 % slower. A regression
  must be reported.

``--stub`` measures a stub server with known latencies. The server must not be faster than the load
generators: choose one whose steps take ten milliseconds or more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tests.tools.openai_stub import Stub
from tgi_cli import demo
from tgi_cli.bench import saved_runs
from tgi_cli.bench.compare import compare
from tgi_cli.bench.events import BenchRun
from tgi_cli.bench.reports.markdown import comparison, table, verdict
from tgi_cli.bench.statistics.metrics import step_metrics
from tgi_cli.process.managed_server import start_server

Figures = dict[str, float]
NAMES = ("requests", "ttft_p50", "tpot_p50", "e2e_p50", "requests_per_second", "tokens_per_second")


class SlowProxy:
    """Forwards a server's streamed response, delaying each part to ``factor`` times its latency."""

    def __init__(self, url: str, factor: float) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=600)
        self._factor = factor

    async def forward(self, request: Request) -> Response:
        """Forward a request of any route and method."""
        began = time.monotonic()
        forwarded = self._client.build_request(
            request.method,
            request.url.path,
            content=await request.body(),
            headers={"content-type": request.headers.get("content-type", "application/json")},
        )
        answer = await self._client.send(forwarded, stream=True)

        async def parts() -> AsyncIterator[bytes]:
            try:
                async for part in answer.aiter_raw():
                    due = began + (time.monotonic() - began) * self._factor
                    await asyncio.sleep(due - time.monotonic())
                    yield part
            finally:
                await answer.aclose()

        kind = answer.headers.get("content-type")
        return StreamingResponse(parts(), answer.status_code, media_type=kind)


@contextlib.contextmanager
def slowed(url: str, factor: float) -> Iterator[str]:
    """Run a proxy that makes a server slower, and yield its URL."""
    proxy = SlowProxy(url, factor)
    routes = [Route("/{path:path}", proxy.forward, methods=["GET", "POST"])]
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(Starlette(routes=routes), log_level="warning", lifespan="off")
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        listener.close()


def ours(url: str, options: argparse.Namespace, folder: Path, name: str) -> BenchRun:
    """Run ``tgi bench``."""
    path = folder / f"{name}.json"
    command = [sys.executable, "-m", "tgi_cli", "bench", "--url", url, "--ui", "none"]
    command += ["--concurrency", str(options.clients), "--requests", str(options.requests)]
    command += ["--input-tokens", str(options.input), "--output-tokens", str(options.output)]
    command += ["--route", "completions", "--ignore-eos", "--output", str(path)]
    subprocess.run(command, check=True)
    return saved_runs.load(path)


def of_ours(run: BenchRun) -> Figures:
    metrics = step_metrics(run.steps[0], intervals=False)
    return {
        "requests": metrics.succeeded,
        **{f"{name}_p50": metrics.latencies[name].p50 for name in ("ttft", "tpot", "e2e")},
        "requests_per_second": metrics.rates["requests_per_second"],
        "tokens_per_second": metrics.rates["output_tokens_per_second"],
    }


def of_script(url: str, options: argparse.Namespace) -> Figures:
    """Run the script in a process of its own."""
    numbers = [options.clients, options.requests, options.input, options.output]
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.httpx_load", url, *map(str, numbers)],
        check=True,
        capture_output=True,
        text=True,
    )
    found: Figures = json.loads(done.stdout)
    return found


def of_guidellm(url: str, options: argparse.Namespace, folder: Path) -> Figures:
    """Run guidellm 0.8, whose inter-token latency is our TPOT."""
    path = folder / "guidellm.json"
    tokenizer = options.tokenizer or str(demo.model_path())
    lengths = f"prompt_tokens={options.input},output_tokens={options.output}"
    backend = {"kind": "openai_http", "target": url, "request_format": "/v1/completions"}
    command = [options.guidellm, "-m", "guidellm", "run", "--backend", json.dumps(backend)]
    command += ["--profile", f"kind=concurrent,streams={options.clients}"]
    command += ["--constraint", f"kind=max_requests,count={options.requests}"]
    command += ["--tokenizer", json.dumps({"kind": "huggingface_auto", "model": tokenizer})]
    command += ["--data", f"kind=synthetic_text,{lengths}", "--disable-console"]
    command += ["--output", f"kind=json,path={path}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (benchmark,) = json.loads(path.read_text())["benchmarks"]
    metrics = benchmark["metrics"]

    def of(name: str, statistic: str) -> float:
        return float(metrics[name]["successful"][statistic])

    return {
        "requests": float(metrics["request_totals"]["successful"]),
        "ttft_p50": of("time_to_first_token_ms", "median"),
        "tpot_p50": of("inter_token_latency_ms", "median"),
        "e2e_p50": of("request_latency", "median") * 1000,
        "requests_per_second": of("requests_per_second", "mean"),
        "tokens_per_second": of("output_tokens_per_second", "mean"),
    }


def agreement(generators: dict[str, list[Figures]]) -> str:
    """Tabulate the median of each figure by load generator, and its ratio to the first one's."""
    middle = {
        generator: {name: statistics.median(each[name] for each in rounds) for name in NAMES}
        for generator, rounds in generators.items()
    }
    first = next(iter(middle))
    rows = []
    for name in NAMES:
        row = [name]
        for generator, found in middle.items():
            ratio = found[name] / middle[first][name]
            row.append(f"{found[name]:.2f}" + ("" if generator == first else f" ({ratio:.3f})"))
        rows.append(row)
    return table(["median of the rounds", *middle], rows)


async def measured(url: str, options: argparse.Namespace, folder: Path) -> None:
    """Print all three tables."""
    generators: dict[str, list[Figures]] = {"tgi bench": [], "script": []}
    if options.guidellm:
        generators["guidellm"] = []
    runs: list[BenchRun] = []
    for number in range(options.rounds):
        runs.append(await asyncio.to_thread(ours, url, options, folder, f"run-{number}"))
        generators["tgi bench"].append(of_ours(runs[-1]))
        generators["script"].append(await asyncio.to_thread(of_script, url, options))
        if options.guidellm:
            found = await asyncio.to_thread(of_guidellm, url, options, folder)
            generators["guidellm"].append(found)
    print(f"## Agreement, {options.clients} clients, {options.rounds} alternating rounds\n")
    print(agreement(generators), end="\n\n")
    print("## Repeated runs of the same server\n")
    for number, again in enumerate(runs[1:], start=1):
        print(f"- first run and run {number + 1}: {verdict(compare(runs[0], again))}")
    with slowed(url, 1 + options.slower / 100) as slow, slowed(url, 1.0) as plain:
        first = await asyncio.to_thread(ours, plain, options, folder, "plain")
        second = await asyncio.to_thread(ours, slow, options, folder, "slow")
    print(f"\n## A proxy with {options.slower:g} % added latency, compared with one without\n")
    print(comparison(compare(first, second)))


def stubbed(options: argparse.Namespace) -> None:
    """Print the tables for a stub server, whose true metrics are known."""
    slower = 1 + options.slower / 100
    stub, slow = (Stub(prefill=0.05 * factor, token=0.02 * factor) for factor in (1.0, slower))
    with tempfile.TemporaryDirectory(prefix="tgi-bench-") as name:
        folder = Path(name)
        runs: list[BenchRun] = []
        generators: dict[str, list[Figures]] = {"tgi bench": [], "script": []}
        if options.guidellm:
            generators["guidellm"] = []
        with stub.serving():
            for number in range(options.rounds):
                runs.append(ours(stub.url, options, folder, f"run-{number}"))
                generators["tgi bench"].append(of_ours(runs[-1]))
                generators["script"].append(of_script(stub.url, options))
                if options.guidellm:
                    generators["guidellm"].append(of_guidellm(stub.url, options, folder))
        print(
            f"## 50 ms to the first token, 20 ms to each further one, {options.clients} clients\n"
        )
        print(agreement(generators), end="\n\n")
        for number, again in enumerate(runs[1:], start=1):
            print(f"- first run and run {number + 1}: {verdict(compare(runs[0], again))}")
        with slow.serving():
            second = ours(slow.url, options, folder, "slow")
        print(f"\n## {options.slower:g} % slower\n")
        print(comparison(compare(runs[0], second)))


async def run(options: argparse.Namespace) -> None:
    """Measure the server at ``--url``, or serve the bundled model."""
    context: Any = contextlib.nullcontext()
    if not options.url:
        context = start_server("", log_line=lambda line: None)
    with tempfile.TemporaryDirectory(prefix="tgi-bench-") as folder:
        async with context as server:
            await measured(options.url or server.url, options, Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--input", type=int, default=64)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slower", type=float, default=10.0)
    parser.add_argument("--guidellm", metavar="PYTHON", default="")
    parser.add_argument(
        "--tokenizer", default="", help="with --url: a folder or a model id, for guidellm"
    )
    parser.add_argument(
        "--stub", action="store_true", help="measure a stub server with known latencies"
    )
    options = parser.parse_args()
    if options.stub:
        stubbed(options)
    else:
        asyncio.run(run(options))


if __name__ == "__main__":
    main()
