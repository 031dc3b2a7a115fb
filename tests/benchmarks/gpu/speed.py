"""The call ``speed``: steps and workloads, compared with what the device can do."""

from __future__ import annotations

import gc
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.gpu import engine, trace
from tests.benchmarks.gpu.device import synchronize
from tests.benchmarks.gpu.engine import Workload, decode_steps, play, prefill_seconds
from tests.benchmarks.gpu.products import product_rows
from tests.benchmarks.gpu.sections import Call, Section, Worker
from tgi_cli.engine.metrics import StepStats
from tgi_cli.models import load_model, read_config, weight_filling
from tgi_cli.sampling.params import SamplingParams

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
SAMPLED = {
    "greedy": engine.GREEDY,
    "temperature 0.8": SamplingParams(temperature=0.8, seed=1),
    "top_p 0.95": SamplingParams(temperature=0.8, seed=1, top_p=0.95),
    "top_k 50": SamplingParams(temperature=0.8, seed=1, top_k=50),
    "all stages": ALL_STAGES,
}

PLANS: dict[bool, dict[str, Any]] = {
    True: {
        "context": 1024,
        "batches": (1, 8, 32, 128, 256),
        "long": ((1, 32768), (8, 32768), (1, 100000)),
        "skewed": (64, 1024, 100000),
        "steps": 60,
        "prompts": (512, 2048, 8192, 32768),
        "workloads": [[1000, 1000, 256], [128, 2048, 256], [1000, 1000, 64]],
        "arrivals": (12.0, 120, 600, 128),
        "traced": (32, 1024, 96),
        "limits": {
            "max_total_tokens": 102400,
            "max_batch_prefill_tokens": 8192,
            "max_batch_size": 256,
        },
        "shapes": (
            ("1b", None, 16.0),
            ("8b", "fp8", 8.0),
            ("8b", "bitsandbytes-nf4", 4.5),
            ("30b-a3b", None, 16.0),
            ("8b", "int8", 8.0),
        ),
        "loaded": "1b",
    },
    False: {
        "context": 32,
        "batches": (1, 3),
        "long": ((1, 60),),
        "skewed": (3, 8, 60),
        "steps": 8,
        "prompts": (16, 40),
        "workloads": [[10, 5, 4], [4, 8, 4]],
        "arrivals": (100.0, 6, 20, 4),
        "traced": (2, 8, 12),
        "limits": {
            "max_total_tokens": 128,
            "max_batch_prefill_tokens": 64,
            "max_batch_size": 4,
            "max_batch_total_tokens": 1024,
        },
        "shapes": (("tiny-moe", None, 16.0), ("tiny", "int8", 8.0)),
        "loaded": "tiny",
    },
}
"""Parameters for a GPU (True), and for a miniature on a CPU that only tests the script.

``arrivals``: requests per second, how many, tokens of a prompt at most, tokens of an answer.
``shapes``: name, quantization, bits of a weight.
"""

TARGETS = {1: 1.15, 8: 1.15, 32: 1.15, 128: 1.25, 256: 1.25}
"""Target ratio of step time to the memory roofline, by batch size."""


def _plan(call: Call) -> dict[str, Any]:
    return PLANS[call.large]


def _worker(call: Call) -> Worker:
    return call.worker(**_plan(call)["limits"])


def _device(call: Call) -> dict[str, Any]:
    device = call.device
    return {
        "name": device.name,
        "copy GB/s, read and written": device.copy_bytes / 1e9,
        "sum GB/s, read": device.read_bytes / 1e9,
        "bf16 TFLOP/s": device.matrix_flops / 1e12,
    }


def _start(call: Call) -> dict[str, Any]:
    worker, limits = _worker(call)
    capacity = worker.capacity
    assert capacity is not None
    graphs, mixed = worker.runner.graphs, worker.runner.mixed_graphs
    return {
        "attention": type(worker.attention).__name__,
        "load s": capacity.load_seconds,
        "warm-up s": capacity.warmup_seconds,
        "weights GB": capacity.weight_bytes / 1e9,
        "activations and graphs GB": capacity.activation_bytes / 1e9,
        "cache tokens": limits.num_blocks * limits.block_size,
        "graphs of decodes": "none" if graphs is None else str(graphs.sizes),
        "graphs of steps with prompts": 0 if mixed is None else len(mixed.captured),
    }


def _decode_row(call: Call, batch: int, context: int, made: Worker) -> dict[str, Any]:
    got = decode_steps(*made, [context] * batch, _plan(call)["steps"])
    roofline = call.shape().decode_bytes(batch, context) / call.device.bandwidth
    return {
        "batch": batch,
        "context": context,
        "step ms": 1e3 * got.step,
        "roofline ms": 1e3 * roofline,
        "ratio": got.step / roofline,
        "target": TARGETS.get(batch),
        "graph alone ms": None if got.graph is None else 1e3 * got.graph,
        "host launch ms": 1e3 * got.launch,
        "tok/s": batch / got.step,
    }


def _decode(call: Call) -> list[dict[str, Any]]:
    plan, made = _plan(call), _worker(call)
    sizes = [*((batch, plan["context"]) for batch in plan["batches"]), *plan["long"]]
    return [_decode_row(call, batch, context, made) for batch, context in sizes]


def _skewed(call: Call) -> list[dict[str, Any]]:
    """One long context among short ones should cost what its own tokens cost."""
    batch, short, long = _plan(call)["skewed"]
    steps, rows = _plan(call)["steps"], []
    for name, contexts in (
        ("short alone", [short] * (batch - 1)),
        ("long alone", [long]),
        ("together", [*[short] * (batch - 1), long]),
    ):
        got = decode_steps(*_worker(call), contexts, steps)
        cached = sum(contexts) * call.shape().kv_bytes + call.shape().weight_bytes(len(contexts))
        roofline = cached / call.device.bandwidth
        rows.append(
            {
                "rows": name,
                "step ms": 1e3 * got.step,
                "roofline ms": 1e3 * roofline,
                "ratio": got.step / roofline,
            }
        )
    return rows


def _sampled(call: Call) -> list[dict[str, Any]]:
    plan, rows = _plan(call), []
    for batch in plan["batches"]:
        row: dict[str, Any] = {"batch": batch}
        for name, sampling in SAMPLED.items():
            contexts = [plan["context"]] * batch
            got = decode_steps(*_worker(call), contexts, plan["steps"] // 2, sampling)
            row[f"{name}, step ms"] = 1e3 * got.step
        rows.append(row)
    return rows


def _products(call: Call) -> list[dict[str, Any]]:
    if not call.large:
        return []  # the ways to compute them are a GPU's
    return product_rows(call, _worker(call)[0].model)


def _ladder(call: Call) -> list[dict[str, Any]]:
    """Measure the gain of CUDA graphs and of overlapping steps, one by one."""
    worker, limits = _worker(call)
    plan = _plan(call)
    batch, _, _ = plan["traced"]
    graphs, rows = worker.runner.graphs, []
    for used in (None, graphs) if graphs is not None else (None,):
        for depth in (0, 1):
            worker.runner.graphs = used
            try:
                contexts = [plan["context"]] * batch
                got = decode_steps(worker, limits, contexts, plan["steps"], depth=depth)
            finally:
                worker.runner.graphs = graphs
            how = "eager" if used is None else "graphs"
            how += ", overlapping steps" if depth else ", one step at a time"
            row = {"how": how, "batch": batch, "step ms": 1e3 * got.step}
            rows.append(row | {"host launch ms": 1e3 * got.launch})
    return rows


def _prefill(call: Call) -> list[dict[str, Any]]:
    rows = []
    for tokens in _plan(call)["prompts"]:
        seconds = prefill_seconds(*_worker(call), tokens)
        rate = call.shape().prefill_flops(tokens) / seconds
        rows.append(
            {
                "tokens": tokens,
                "ms": 1e3 * seconds,
                "tok/s": tokens / seconds,
                "TFLOP/s": rate / 1e12,
                "of the matrix rate": rate / call.device.matrix_flops,
            }
        )
    return rows


def _arrivals(call: Call) -> list[dict[str, Any]]:
    """Requests that arrive at random, whose prompts meet others' decodes."""
    rate, requests, longest, new = _plan(call)["arrivals"]
    choose = random.Random(7)
    vocab = call.shape().config["vocab_size"]
    prompts = [
        choose.choices(range(3, vocab), k=choose.randint(longest // 10, longest))
        for _ in range(requests)
    ]
    moments, at = [], 0.0
    for _ in range(requests):
        at += choose.expovariate(rate)
        moments.append(at)
    worker, limits = _worker(call)
    mixed, rows = worker.runner.mixed_graphs, []
    for used in (mixed, None) if mixed is not None else (None,):
        worker.runner.mixed_graphs = used
        try:
            played = play(worker, limits, Workload(prompts, new, arrivals=moments))
        finally:
            worker.runner.mixed_graphs = mixed
        gaps, firsts = played.gaps(), played.first_tokens()
        rows.append(
            {
                "steps with prompts": "launched" if used is None else "graphs",
                "requests/s": rate,
                "output tok/s": played.count / played.seconds,
                "to the first token, median ms": 1e3 * firsts[len(firsts) // 2],
                "99th percentile ms": 1e3 * firsts[int(len(firsts) * 0.99)],
                "between tokens, median ms": 1e3 * gaps[len(gaps) // 2],
                "between tokens, 99th percentile ms": 1e3 * gaps[int(len(gaps) * 0.99)],
            }
        )
    return rows


def _offline(call: Call) -> list[dict[str, Any]]:
    rows = []
    for prompt, new, requests in _plan(call)["workloads"]:
        vocab = call.shape().config["vocab_size"]
        prompts = engine.random_prompts(requests, prompt, vocab)
        played = play(*_worker(call), Workload(prompts, new))
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


def _trace(call: Call) -> dict[str, Any]:
    """Profile decode steps in the core loop."""
    requests, prompt, new = _plan(call)["traced"]
    activity = torch.profiler.ProfilerActivity
    kind = activity.CUDA if call.large else activity.CPU
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
            synchronize(torch.device(call.kind))
            profiler.stop()

    prompts = engine.random_prompts(requests, prompt, call.shape().config["vocab_size"])
    play(*_worker(call), Workload(prompts, new), on_step=profile)
    call.out.mkdir(parents=True, exist_ok=True)
    path = call.out / "decode-trace.json"
    profiler.export_chrome_trace(str(path))
    found = trace.exposed(path)
    figures: dict[str, Any] = {"batch": requests, "trace": path.name}
    if found is None:
        return {**figures, "exposed": "no two graphs in the trace"}
    figures |= {f"{key} us": value for key, value in asdict(found).items()}
    figures["share"] = figures.pop("share us")
    return figures


def _kernels(call: Call) -> list[dict[str, Any]]:
    """List the longest kernels of a decode step (from the trace) and of a long prompt."""
    rows = []
    path = call.out / "decode-trace.json"
    _, _, new = _plan(call)["traced"]
    if path.exists():
        steps = 3 * new // 4 - new // 4
        rows += [{"of": "decode", **row} for row in trace.top_kernels(path, steps)]
    if call.large:
        tokens = 8192
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as got:
            prefill_seconds(*_worker(call), tokens, repeats=1)
        path = call.out / "prefill-trace.json"
        got.export_chrome_trace(str(path))
        rows += [{"of": f"{tokens} tokens", **row} for row in trace.top_kernels(path, 2)]
    return rows


@contextmanager
def no_implicit_waiting(kind: str) -> Iterator[None]:
    """Turn implicit synchronization of the host into an error."""
    if kind == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if kind == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def _syncs(call: Call) -> dict[str, Any]:
    """Run the core loop with implicit host synchronization turned into errors."""
    requests, prompt, new = 4, _plan(call)["prompts"][0], 8
    prompts = engine.random_prompts(requests, prompt, call.shape().config["vocab_size"])
    found = {}
    for name, sampling in (("greedy", engine.GREEDY), ("all stages", ALL_STAGES)):
        play(*_worker(call), Workload(prompts, new, sampling))
        with no_implicit_waiting(call.kind):
            play(*_worker(call), Workload(prompts, new, sampling))
        found[name] = "none"
    return found


def _shape(number: int, call: Call) -> list[dict[str, Any]]:
    """Decodes of another model or quantization."""
    plan, rows = _plan(call), []
    if number >= len(plan["shapes"]):
        return []
    limits = dict(plan["limits"]) | {
        "max_total_tokens": min(2048, plan["limits"]["max_total_tokens"])
    }
    name, quantize, bits = plan["shapes"][number]
    made = call.worker(name, quantize=quantize, **limits)
    shape = call.shape(name)
    for batch in plan["batches"]:
        got = decode_steps(*made, [plan["context"]] * batch, plan["steps"] // 2)
        read = shape.decode_bytes(batch, plan["context"], bits)
        roofline = read / call.device.bandwidth
        rows.append(
            {
                "model": name,
                "weights": quantize or "bf16",
                "batch": batch,
                "step ms": 1e3 * got.step,
                "roofline ms": 1e3 * roofline,
                "ratio": got.step / roofline,
                "host launch ms": 1e3 * got.launch,
            }
        )
    tokens = plan["prompts"][1]
    seconds = prefill_seconds(*made, min(tokens, limits["max_total_tokens"] - 2))
    rows[-1]["prefill tok/s"] = tokens / seconds
    call.free()
    return rows


def _loading(call: Call) -> list[dict[str, Any]]:
    """Load a checkpoint from the page cache, through mappings and read ahead by threads."""
    from safetensors.torch import save_file

    name = _plan(call)["loaded"]
    call.free()
    call.shape(name)
    folder, device = call.folder / name, torch.device(call.kind)
    config, rows = read_config(folder), []
    with engine.random_on(device):
        model = load_model(config, torch.bfloat16, device, load_format="dummy")
    tensors = _stored_tensors(model)
    with tempfile.TemporaryDirectory() as made:
        target = Path(made)
        (target / "config.json").write_text((folder / "config.json").read_text())
        save_file(tensors, target / "model.safetensors")
        size = sum(tensor.nbytes for tensor in tensors.values())
        del model, tensors
        gc.collect()
        for how, kinds in (("mappings", frozenset[str]()), ("threads", frozenset({call.kind}))):
            before, weight_filling.READS_AHEAD = weight_filling.READS_AHEAD, kinds
            try:
                began = time.perf_counter()
                load_model(read_config(target), torch.bfloat16, device)
                synchronize(device)
                seconds = time.perf_counter() - began
            finally:
                weight_filling.READS_AHEAD = before
            rows.append(
                {"read by": how, "GB": size / 1e9, "s": seconds, "GB/s": size / 1e9 / seconds}
            )
    return rows


def _stored_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Random tensors by the names and shapes that the model wants of a checkpoint."""
    wanted: dict[str, torch.Tensor] = {}
    for _, slots in weight_filling.layer_slots(model):
        for slot in slots:
            name = model.source(slot.name).names[0]
            wanted[name] = torch.randn(slot.shape).bfloat16()
    return wanted


SECTIONS = (
    Section("device", _device, 10, 40),
    Section("start", _start, 30, 150),
    Section("decode", _decode, 25, 120),
    Section("skewed", _skewed, 10, 60),
    Section("sampled", _sampled, 20, 60),
    Section("products", _products, 15, 60),
    Section("ladder", _ladder, 10, 60),
    Section("prefill", _prefill, 15, 60),
    Section("arrivals", _arrivals, 40, 120),
    Section("trace", _trace, 15, 60),
    Section("kernels", _kernels, 10, 60),
    Section("syncs", _syncs, 10, 60),
    Section("offline", _offline, 60, 150),
    *(
        Section(f"shape {name}, {quantize or 'bf16'}", partial(_shape, number), 45, 120)
        for number, (name, quantize, _) in enumerate(PLANS[True]["shapes"])
    ),
    Section("loading", _loading, 25, 60),
)
