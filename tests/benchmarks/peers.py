"""Serving speed over HTTP, side by side with transformers, in one run.

    python -m tests.tools.checkpoints --shape 135m --tokenizer tgi_cli/demo/model /tmp/small
    python -m tests.benchmarks.peers /tmp/small --concurrency 1 8 32

Waves of C streaming requests at once: prompts of distinct random tokens (no prefix reuse),
greedy; random weights end a text about never, and a wave that is short of tokens is an error.
The checkpoint needs a tokenizer (``--tokenizer`` of the tool above). ``tgi`` is a server
process driven over HTTP with one client process on the same cores; ``transformers`` is
``generate`` in a process of its own, in-process and padded, which spares it all HTTP cost.
Rounds alternate between the two; medians are printed with their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

TRANSFORMERS = """
import json, sys, time, torch
from transformers import AutoModelForCausalLM
path, new, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3]
model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
model.generation_config.eos_token_id = None
model.generation_config.pad_token_id = 0
print("ready", flush=True)
for line in sys.stdin:
    ids = torch.tensor(json.loads(line))
    start = time.perf_counter()
    with torch.inference_mode():
        first = model.generate(ids, max_new_tokens=1, do_sample=False)
        ttft = time.perf_counter() - start
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=new, do_sample=False)
    print(json.dumps({"seconds": time.perf_counter() - start, "ttft": ttft}), flush=True)
"""


@dataclass(frozen=True)
class Wave:
    """One wave of requests: output tokens per second and median time to first token (s)."""

    rate: float
    ttft: float


class TgiPeer:
    """Our server as a process; requests go to /generate_stream."""

    name = "tgi"

    def __init__(self, model: Path, new_tokens: int, dtype: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.new_tokens = new_tokens
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "tgi_cli", "serve", str(model)]
        command += ["--port", str(port), "--hostname", "127.0.0.1", "--dtype", dtype]
        command += ["--no-prefix-caching"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.2)
        raise RuntimeError("the server did not start")

    def wave(self, prompts: list[list[int]]) -> Wave:
        return asyncio.run(self._wave(prompts))

    async def _wave(self, prompts: list[list[int]]) -> Wave:
        ttfts: list[float] = []
        tokens = 0

        async def one(client: httpx.AsyncClient, prompt: list[int]) -> None:
            nonlocal tokens
            # Text that is longer than the prompt must be: its last tokens are kept.
            text = "".join(f" {token:x}" for token in prompt * 2)
            parameters = {"max_new_tokens": self.new_tokens, "truncate": len(prompt)}
            body = {"inputs": text, "parameters": parameters}
            begin = time.perf_counter()
            first = True
            async with client.stream("POST", f"{self.url}/generate_stream", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line.startswith("data:"):
                        if first:
                            ttfts.append(time.perf_counter() - begin)
                            first = False
                        tokens += 1

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=600, limits=limits) as client:
            start = time.perf_counter()
            await asyncio.gather(*(one(client, prompt) for prompt in prompts))
            seconds = time.perf_counter() - start
        expected = len(prompts) * self.new_tokens
        if tokens != expected:
            raise RuntimeError(f"{tokens} events for {expected} tokens: the waves do not compare")
        return Wave(expected / seconds, statistics.median(ttfts))

    def peak_mb(self) -> float:
        """Peak resident memory of launcher, router and model server together."""
        total = 0
        for pid in [self.process.pid, *_children(self.process.pid)]:
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmHWM"):
                    total += int(line.split()[1])
        return total / 1024

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)


class TransformersPeer:
    """``generate`` on the whole wave as one batch, in a process of its own."""

    name = "transformers"

    def __init__(self, model: Path, new_tokens: int, dtype: str) -> None:
        self.new_tokens = new_tokens
        command = [sys.executable, "-c", TRANSFORMERS, str(model), str(new_tokens), dtype]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._read()

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("transformers ended")
        return line

    def wave(self, prompts: list[list[int]]) -> Wave:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(prompts) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self._read())
        return Wave(len(prompts) * self.new_tokens / answer["seconds"], answer["ttft"])

    def peak_mb(self) -> float:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
        raise RuntimeError("no VmHWM")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def _children(pid: int) -> list[int]:
    listing = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in listing.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--alone", action="store_true", help="measure tgi without the peer")
    arguments = parser.parse_args()
    vocab = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    random_ = random.Random(0)
    kinds = [TgiPeer] if arguments.alone else [TgiPeer, TransformersPeer]
    peers = [kind(arguments.model, arguments.new_tokens, arguments.dtype) for kind in kinds]
    try:
        print("| concurrent | peer | output tok/s (min-max) | TTFT ms | tgi / peer |")
        print("|---|---|---|---|---|")
        for concurrency in arguments.concurrency:
            figures: dict[str, list[Wave]] = {peer.name: [] for peer in peers}
            for _ in range(arguments.rounds + 1):  # the first round warms up
                for peer in peers:
                    prompts = [
                        [random_.randrange(10, vocab) for _ in range(arguments.prompt_tokens)]
                        for _ in range(concurrency)
                    ]
                    figures[peer.name].append(peer.wave(prompts))
            ours = statistics.median(wave.rate for wave in figures["tgi"][1:])
            for peer in peers:
                waves = figures[peer.name][1:]
                rates = sorted(wave.rate for wave in waves)
                ttft = statistics.median(wave.ttft for wave in waves) * 1000
                rate = statistics.median(rates)
                spread = f"{rate:.1f} ({rates[0]:.1f}-{rates[-1]:.1f})"
                row = f"{concurrency} | {peer.name} | {spread} | {ttft:.0f} | {ours / rate:.2f}"
                print(f"| {row} |", flush=True)
        for peer in peers:
            print(f"peak resident memory, {peer.name}: {peer.peak_mb():.0f} MB")
    finally:
        for peer in peers:
            peer.close()


if __name__ == "__main__":
    main()
