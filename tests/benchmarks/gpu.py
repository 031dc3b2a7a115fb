"""Benchmark the engine on a GPU against the GPU's limits. Needs only the repository and torch.

    python -m tests.benchmarks.gpu --out figures               # everything, within 8 minutes
    python -m tests.benchmarks.gpu --only decode prefill
    python -m tests.benchmarks.gpu --check                     # correctness only
    python -m tests.benchmarks.gpu --device cpu --shape tiny   # try the script without a GPU

Writes figures to OUT/gpu.json and OUT/gpu.md after each section. A section that fails is reported
with the error, and the others still run. The model has random bf16 weights in the shape of
Llama-3.1-8B and no tokenizer. The limits are measured first: bytes per second of a large copy,
operations per second of a large matrix product.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks import gpu_check, gpu_engine, gpu_peers, gpu_trace
from tests.benchmarks.gpu_device import Device, measure, synchronize, versions
from tests.benchmarks.gpu_engine import Shape, decode_steps, make, play, prefill_seconds
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.metrics import StepStats
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.worker import ModelWorker

ALL_STAGES = SamplingParams(
    temperature=0.7,
    seed=1,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    typical_p=0.95,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    top_logprobs=3,
)

PLANS: dict[bool, dict[str, Any]] = {
    True: {
        "context": 1024,
        "batches": (1, 8, 32, 128, 256),
        "steps": 80,
        "prompts": (512, 2048, 8192),
        "workloads": [[1000, 1000, 256], [128, 2048, 256], [1000, 1000, 64]],
        "traced": (32, 1024, 96),
        "max_total_tokens": 8448,
        "max_batch_prefill_tokens": 8192,
        "max_batch_size": 256,
    },
    False: {
        "context": 32,
        "batches": (1, 3),
        "steps": 8,
        "prompts": (16, 40),
        "workloads": [[10, 5, 4], [4, 8, 4]],
        "traced": (2, 8, 12),
        "max_total_tokens": 128,
        "max_batch_prefill_tokens": 64,
        "max_batch_size": 4,
        "max_batch_total_tokens": 1024,
    },
}
"""Parameters for a GPU (True), and for a miniature on a CPU that only tests the script."""

TARGETS = {1: 1.15, 8: 1.15, 32: 1.15, 128: 1.25, 256: 1.25}
"""Target ratio of step time to the memory roofline, by batch size."""

SECONDS = {
    "decode": 20,
    "ladder": 10,
    "prefill": 10,
    "offline": 60,
    "trace": 15,
    "syncs": 10,
    "peers": 90,
}
"""Time that must be left to start a section."""


class Benchmark:
    """The sections and their shared state."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.kind: str = options.device
        self.out: Path = options.out
        self.deadline: float = time.monotonic() + 60 * options.minutes
        self.plan = PLANS[self.kind == "cuda"]
        self.folder = Path(tempfile.mkdtemp(prefix="gpu-"))
        self.shape: Shape = gpu_engine.write_shape(options.shape, self.folder / "model")
        self.device: Device | None = None
        self.results: dict[str, Any] = {
            "versions": versions(),
            "shape": options.shape,
            "sections": {},
        }
        self._worker: tuple[ModelWorker, SchedulerConfig] | None = None

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.deadline - time.monotonic()

    def section(self, name: str, run: Callable[[], Any]) -> None:
        """Run a section, record its figures or its failure, and save all results."""
        began = time.monotonic()
        entry: dict[str, Any] = {}
        if self.left < SECONDS.get(name, 0) * (self.kind == "cuda"):
            entry["failed"] = f"not started: {self.left:.0f} s left"
        else:
            try:
                entry["figures"] = run()
            except Exception as error:  # a failure must not stop the other sections
                entry["failed"] = f"{type(error).__name__}: {error}"
                entry["where"] = traceback.format_exc().splitlines()[-12:]
        entry["seconds"] = round(time.monotonic() - began, 1)
        self.results["sections"][name] = entry
        print(f"\n{render(name, entry)}", flush=True)
        self.save()

    def save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "gpu.json").write_text(json.dumps(self.results, indent=2) + "\n")
        parts = [f"# {self.results['versions']}\n"]
        parts += [render(name, entry) for name, entry in self.results["sections"].items()]
        (self.out / "gpu.md").write_text("\n\n".join(parts) + "\n")

    # ------------------------------------------------------------------ sections

    def measure_device(self) -> dict[str, Any]:
        self.device = measure(torch.device(self.kind), torch.bfloat16)
        return {
            "name": self.device.name,
            "copy GB/s, read and written": self.device.copy_bytes / 1e9,
            "bf16 TFLOP/s": self.device.matrix_flops / 1e12,
        }

    @property
    def worker(self) -> tuple[ModelWorker, SchedulerConfig]:
        if self._worker is None:
            keys = ("max_total_tokens", "max_batch_prefill_tokens", "max_batch_size")
            limits = {key: self.plan[key] for key in keys}
            if "max_batch_total_tokens" in self.plan:
                limits["max_batch_total_tokens"] = self.plan["max_batch_total_tokens"]
            self._worker = make(self.folder / "model", self.kind, dtype="bfloat16", **limits)
        return self._worker

    def load(self) -> dict[str, Any]:
        worker, limits = self.worker
        capacity = worker.capacity
        assert capacity is not None
        graphs = worker.runner.graphs
        return {
            "attention": type(worker.attention).__name__,
            "load s": capacity.load_seconds,
            "warm-up s": capacity.warmup_seconds,
            "weights GB": capacity.weight_bytes / 1e9,
            "cache tokens": limits.num_blocks * limits.block_size,
            "graphs": "none" if graphs is None else str(graphs.sizes),
        }

    def decode(self) -> list[dict[str, Any]]:
        assert self.device is not None, "the device was not measured"
        rows = []
        for batch in self.plan["batches"]:
            context, steps = self.plan["context"], self.plan["steps"]
            got = decode_steps(*self.worker, batch, context, steps)
            roofline = self.shape.decode_bytes(batch, context) / self.device.copy_bytes
            rows.append(
                {
                    "batch": batch,
                    "step ms": 1e3 * got.step,
                    "roofline ms": 1e3 * roofline,
                    "ratio": got.step / roofline,
                    "target": TARGETS.get(batch),
                    "graph alone ms": None if got.graph is None else 1e3 * got.graph,
                    "host launch ms": 1e3 * got.launch,
                    "tok/s": batch / got.step,
                }
            )
        return rows

    def ladder(self) -> list[dict[str, Any]]:
        """Measure the gain of CUDA graphs and of overlapping steps, one by one."""
        worker, limits = self.worker
        batch, _, _ = self.plan["traced"]
        graphs, rows = worker.runner.graphs, []
        for used in (None, graphs) if graphs is not None else (None,):
            for depth in (0, 1):
                worker.runner.graphs = used
                try:
                    got = decode_steps(
                        worker, limits, batch, self.plan["context"], self.plan["steps"], depth=depth
                    )
                finally:
                    worker.runner.graphs = graphs
                how = "eager" if used is None else "graphs"
                how += ", overlapping steps" if depth else ", one step at a time"
                rows.append({"how": how, "batch": batch, "step ms": 1e3 * got.step})
        return rows

    def prefill(self) -> list[dict[str, Any]]:
        assert self.device is not None, "the device was not measured"
        rows = []
        for tokens in self.plan["prompts"]:
            seconds = prefill_seconds(*self.worker, tokens)
            rate = self.shape.prefill_flops(tokens) / seconds
            rows.append(
                {
                    "tokens": tokens,
                    "ms": 1e3 * seconds,
                    "tok/s": tokens / seconds,
                    "TFLOP/s": rate / 1e12,
                    "of the matrix rate": rate / self.device.matrix_flops,
                }
            )
        return rows

    def offline(self) -> list[dict[str, Any]]:
        rows = []
        for prompt, new, requests in self.plan["workloads"]:
            prompts = gpu_engine.random_prompts(requests, prompt, self.shape.config["vocab_size"])
            play(*self.worker, prompts[:16], 3)  # compile the kernels for this workload
            played = play(*self.worker, prompts, new)
            rows.append(
                {
                    "workload": f"{prompt}/{new}",
                    "requests": requests,
                    "seconds": played.seconds,
                    "output tok/s": played.count / played.seconds,
                    "all tok/s": (played.count + requests * prompt) / played.seconds,
                }
            )
        return rows

    def trace(self) -> dict[str, Any]:
        """Profile decode steps in the core loop."""
        requests, prompt, new = self.plan["traced"]
        activity = torch.profiler.ProfilerActivity
        kind = activity.CUDA if self.kind == "cuda" else activity.CPU
        profiler = torch.profiler.profile(activities=[kind])
        decodes = 0

        def profile(stats: StepStats) -> None:
            nonlocal decodes
            if stats["Context Requests"]:
                return
            decodes += 1
            if decodes == new // 4:
                profiler.start()
            elif decodes == 3 * new // 4:
                synchronize(torch.device(self.kind))
                profiler.stop()

        prompts = gpu_engine.random_prompts(requests, prompt, self.shape.config["vocab_size"])
        play(*self.worker, prompts, new, on_step=profile)
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / "decode-trace.json"
        profiler.export_chrome_trace(str(path))
        found = gpu_trace.exposed(path)
        figures: dict[str, Any] = {"batch": requests, "trace": path.name}
        if found is None:
            return {**figures, "exposed": "no two graphs in the trace"}
        figures |= {f"{key} us": value for key, value in asdict(found).items()}
        figures["share"] = figures.pop("share us")
        return figures

    def kernels(self) -> list[dict[str, Any]]:
        """List the longest kernels of a decode step (from the trace) and of the longest prompt."""
        rows = []
        path = self.out / "decode-trace.json"
        _, _, new = self.plan["traced"]
        if path.exists():
            steps = 3 * new // 4 - new // 4
            rows += [{"of": "decode", **row} for row in gpu_trace.top_kernels(path, steps)]
        if self.kind == "cuda":
            tokens = self.plan["prompts"][-1]
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as got:
                prefill_seconds(*self.worker, tokens, repeats=1)
            path = self.out / "prefill-trace.json"
            got.export_chrome_trace(str(path))
            rows += [{"of": f"{tokens} tokens", **row} for row in gpu_trace.top_kernels(path, 2)]
        return rows

    def syncs(self) -> dict[str, Any]:
        """Run the core loop with implicit host synchronization turned into errors."""
        requests, prompt, new = 4, self.plan["prompts"][0], 8
        prompts = gpu_engine.random_prompts(requests, prompt, self.shape.config["vocab_size"])
        found = {}
        for name, sampling in (("greedy", gpu_engine.GREEDY), ("all stages", ALL_STAGES)):
            play(*self.worker, prompts, new, sampling=sampling)
            if self.kind == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            try:
                play(*self.worker, prompts, new, sampling=sampling)
            finally:
                if self.kind == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
            found[name] = "none"
        return found

    def peers(self) -> list[dict[str, Any]]:
        """Run the installed peers, each in a process of its own, after freeing the device."""
        self._worker = None
        gc.collect()
        if self.kind == "cuda":
            torch.cuda.empty_cache()
        rows: list[dict[str, Any]] = []
        for name in self.options.peers or gpu_peers.installed():
            workloads = self.plan["workloads"]
            if name == "transformers":
                workloads = workloads[-1:]  # it is slow
            try:
                limit = max(30.0, self.left)
                times = gpu_peers.run_peer(name, self.folder / "model", workloads, self.kind, limit)
            except RuntimeError as error:
                rows.append({"peer": gpu_peers.FULL_NAMES[name], "failed": str(error)})
                continue
            for (prompt, new, requests), seconds in zip(workloads, times, strict=True):
                rows.append(
                    {
                        "peer": gpu_peers.FULL_NAMES[name],
                        "workload": f"{prompt}/{new}",
                        "requests": requests,
                        "seconds": seconds,
                        "output tok/s": requests * new / seconds,
                    }
                )
        return rows


def render(name: str, entry: dict[str, Any]) -> str:
    """Format a section as Markdown."""
    lines = [f"## {name} ({entry['seconds']} s)", ""]
    figures = entry.get("figures")
    if "failed" in entry:
        lines.append(f"failed: {entry['failed']}")
    elif isinstance(figures, dict):
        lines += [f"- {key}: {shown(value)}" for key, value in figures.items()]
    elif figures:
        columns = list(dict.fromkeys(key for row in figures for key in row))
        lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [
            f"| {' | '.join(shown(row.get(column)) for column in columns)} |" for row in figures
        ]
    else:
        lines.append("nothing to report")
    return "\n".join(lines)


def shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


SECTIONS = ("decode", "ladder", "prefill", "offline", "trace", "kernels", "syncs", "peers")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="run only these sections")
    parser.add_argument("--check", action="store_true", help="check correctness, measure nothing")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "figures")))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=sorted(gpu_engine.SHAPES), default="8b")
    parser.add_argument("--peers", nargs="+", choices=sorted(gpu_peers.FULL_NAMES))
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device: nothing to measure")
        return 0
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    benchmark = Benchmark(options)
    if options.check:
        parity = lambda: gpu_check.parity(benchmark.folder, options.device)  # noqa: E731
        benchmark.section("parity", parity)
        if options.device == "cuda":
            benchmark.section("tests", lambda: gpu_check.device_tests(benchmark.left))
    else:
        chosen = options.only or SECTIONS
        benchmark.section("device", benchmark.measure_device)
        if set(chosen) - {"peers"}:
            benchmark.section("load", benchmark.load)
        for name in SECTIONS:
            if name in chosen:
                benchmark.section(name, getattr(benchmark, name))
    failed = [name for name, entry in benchmark.results["sections"].items() if "failed" in entry]
    print(f"\nwritten to {benchmark.out}; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
