"""Sleep: memory and time to the first token; several models: requests lost and switches.

python -m tests.benchmarks.model_switching sleep MODEL
python -m tests.benchmarks.model_switching switch MODEL --requests 200 --seconds 60

`switch` serves three copies of MODEL, of which memory holds one, and sends completions for models
drawn at random, which arrive at random times (with a fixed seed). It prints how many were answered
and how often a model was loaded, beside a server that takes requests strictly as they come.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx

from tests.tools.process_tree import descendants_of
from tests.tools.server_process import ServerProcess, stop
from tgi_cli import demo
from tgi_cli.process.proportional_memory import tree_memory

_MIB = 1 << 20
_MAX_SECONDS = 600.0
_NAMES = ("alpha", "beta", "gamma")
_TOKENS = 16


def first_token_seconds(url: str) -> float:
    """Time from a request to its first token."""
    body = {"inputs": "import os", "parameters": {"max_new_tokens": 4}}
    began = time.perf_counter()
    with httpx.stream("POST", f"{url}/generate_stream", json=body, timeout=_MAX_SECONDS) as answer:
        answer.raise_for_status()
        next(answer.iter_lines())
        return time.perf_counter() - began


def measure_sleep(model: str, folder: Path, rounds: int) -> None:
    """Print memory before, asleep and after, and times to the first token."""
    arguments = ["serve", model, "--port=0", "--hostname=127.0.0.1", "--enable-sleep-mode"]
    server = ServerProcess(folder / "server", arguments)
    try:
        server.wait_ready(_MAX_SECONDS)
        url, pid = server.url, server.process.pid
        awake, asleep = [], []
        memory: dict[str, list[int]] = {"awake": [], "asleep": []}
        first_token_seconds(url)
        for _ in range(rounds):
            awake += [first_token_seconds(url) for _ in range(5)]
            memory["awake"].append(tree_memory(pid))
            httpx.post(f"{url}/sleep?mode=wait", timeout=_MAX_SECONDS).raise_for_status()
            memory["asleep"].append(tree_memory(pid))
            asleep.append(first_token_seconds(url))
        memory["after"] = [tree_memory(pid)]
        for name, sizes in memory.items():
            print(f"{name:8} {statistics.median(sizes) / _MIB:8.0f} MiB (Pss of all processes)")
        print(f"first token, awake       {statistics.median(awake) * 1e3:8.1f} ms")
        print(f"first token, from asleep {statistics.median(asleep):8.2f} s", sorted(asleep))
    finally:
        stop(server.process)
        server.kill()


async def ask(client: httpx.AsyncClient, model: str, seconds: float) -> tuple[int, float]:
    """Ask after some seconds; the status, 0 if the connection broke, and the time it took."""
    await asyncio.sleep(seconds)
    body = {"model": model, "prompt": "import os", "max_tokens": _TOKENS, "ignore_eos": True}
    began = time.perf_counter()
    try:
        answer = await client.post("/v1/completions", json=body)
        complete = (
            answer.status_code != httpx.codes.OK
            or answer.json()["usage"]["completion_tokens"] == _TOKENS
        )
        status = answer.status_code if complete else -1
    except httpx.HTTPError:
        status = 0
    return status, time.perf_counter() - began


async def send(url: str, plan: list[tuple[float, str]]) -> list[tuple[int, float]]:
    """Send the requests of a plan at their times."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_MAX_SECONDS, limits=limits) as client:
        return await asyncio.gather(*(ask(client, model, at) for at, model in plan))


def measure_switching(model: str, folder: Path, requests: int, seconds: float, seed: int) -> None:
    """Print what becomes of mixed requests for three models of which one fits."""
    source = Path(model) if model else demo.model_path()
    models = {}
    for name in _NAMES:
        copy = shutil.copytree(source, folder / name)
        models[name] = {"model": str(copy), "max-total-tokens": 512}
    file = folder / "models.yaml"
    file.write_text(json.dumps(models))
    drawn = random.Random(seed)
    times = sorted(drawn.uniform(0, seconds) for _ in range(requests))
    plan = [(at, drawn.choice(_NAMES)) for at in times]
    first_come = sum(1 for _ in itertools.groupby(name for _, name in plan))
    server = ServerProcess(
        folder / "server",
        [
            *("serve", "--models", str(file), "--port=0", "--hostname=127.0.0.1"),
            *("--models-memory=500MiB", "--model-wait-seconds=3600"),
        ],
    )
    try:
        server.wait_ready(_MAX_SECONDS)
        began = time.perf_counter()
        found = asyncio.run(send(server.url, plan))
        took = time.perf_counter() - began
        cards = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
        lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
        loads = sum(
            int(float(line.split()[-1]))
            for line in lines
            if line.startswith("tgi_model_loads_total") and 'result="success"' in line
        )
        waits = sorted(wait for _, wait in found)
        print(f"{requests} requests over {seconds:g} s, answered within {took:.0f} s")
        print("statuses", dict(Counter(status for status, _ in found)), "(0: lost, -1: cut short)")
        print(f"loads {loads}; strictly in the order of arrival {first_come}")
        print(
            f"time of an answer: median {waits[len(waits) // 2]:.1f} s, longest {waits[-1]:.1f} s"
        )
        for card in cards:
            status = card["status"]
            size = status["memory_bytes"] / _MIB
            print(f"{card['id']}: loaded in {status.get('load_seconds')} s, {size:.0f} MiB")
        pids = descendants_of(server.process.pid)
        print(f"processes at the end: {len(pids)}")
    finally:
        stop(server.process)
        server.kill()


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["sleep", "switch"])
    parser.add_argument("model", nargs="?", default="", help="default: the bundled model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tgi-switching-") as base:
        folder = Path(base)
        if options.what == "sleep":
            measure_sleep(options.model or str(demo.model_path()), folder, options.rounds)
        else:
            measure_switching(
                options.model, folder, options.requests, options.seconds, options.seed
            )


if __name__ == "__main__":
    main()
