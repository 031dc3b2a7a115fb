"""Measure a layer's elementwise operations: time, and share of the memory bandwidth.

    python -m tests.benchmarks.ops [--device cuda] [--hidden 4096] [--heads 32] [--kv-heads 8]

Measures the reference operations, and on CUDA also the Triton kernels, both in a CUDA graph to
exclude launch overhead. The share is relative to a large copy on the same device,
counting each byte that an operation must read or write once. With few tokens, which fit into
caches, it can exceed 100 %. The Triton kernels have not been measured yet.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from tgi_cli.layers import ops

Step = Callable[[], object]
PER_ROUND = 20


def cases(
    tokens: int, arguments: argparse.Namespace, device: torch.device
) -> Iterator[tuple[str, Step, int]]:
    """Yield name, operation and the bytes that it must read and write."""
    dtype = getattr(torch, arguments.dtype)
    hidden, dims = arguments.hidden, arguments.head_dim
    heads = arguments.heads + arguments.kv_heads

    def random_tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    def nbytes(*tensors: Tensor) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    x, residual, weight = (
        random_tensor(tokens, hidden),
        random_tensor(tokens, hidden),
        random_tensor(hidden),
    )
    qkv = random_tensor(tokens, heads + arguments.kv_heads, dims)
    rotated, weights = qkv[:, :heads], random_tensor(heads, dims)
    cosines, sines = (
        random_tensor(tokens, 1, dims).clamp_(-1, 1),
        random_tensor(tokens, 1, dims).clamp_(-1, 1),
    )
    gate_up = random_tensor(tokens, 2 * arguments.intermediate)
    eps = 1e-6
    yield "rms_norm", lambda: ops.rms_norm(x, weight, eps), 2 * nbytes(x) + nbytes(weight)
    yield (
        "add_rms_norm",
        lambda: ops.add_rms_norm(x, residual, weight, eps),
        4 * nbytes(x) + nbytes(weight),
    )
    yield (
        "add_layer_norm",
        lambda: ops.add_layer_norm(x, residual, weight, weight, eps),
        4 * nbytes(x) + 2 * nbytes(weight),
    )
    yield (
        "rotate_",
        lambda: ops.rotate_(rotated, cosines, sines),
        2 * nbytes(rotated) + nbytes(cosines, sines),
    )
    yield (
        "norm_rotate_",
        lambda: ops.norm_rotate_(rotated, weights, eps, cosines, sines),
        2 * nbytes(rotated) + nbytes(cosines, sines, weights),
    )
    for activation in ("silu", "gelu_pytorch_tanh", "gelu"):
        yield (
            f"gated {activation}",
            partial(ops.gated, gate_up, activation),
            nbytes(gate_up) * 3 // 2,
        )


def median_seconds(step: Step, device: torch.device, rounds: int) -> float:
    """Return the median seconds of a call on the device."""
    if device.type == "cpu":
        return statistics.median(_cpu_seconds(step) for _ in range(rounds))
    for _ in range(3):  # compile
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(PER_ROUND):
            step()
    graph.replay()
    return statistics.median(_graph_seconds(graph) for _ in range(rounds))


def _cpu_seconds(step: Step) -> float:
    step()
    begin = time.perf_counter()
    for _ in range(PER_ROUND):
        step()
    return (time.perf_counter() - begin) / PER_ROUND


def _graph_seconds(graph: torch.cuda.CUDAGraph) -> float:
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / PER_ROUND


def copy_bandwidth(device: torch.device, size: int, rounds: int) -> float:
    """Return the bytes per second that a copy of ``size`` bytes reads and writes."""
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    source.zero_()
    return 2 * size / median_seconds(lambda: target.copy_(source), device, rounds)


def measure(tokens: int, arguments: argparse.Namespace, device: torch.device, peak: float) -> None:
    """Print a line per operation."""
    for name, step, moved in cases(tokens, arguments, device):
        with patch.object(ops, "triton_kernels", lambda: None):
            columns = [("torch", median_seconds(step, device, arguments.rounds))]
        if device.type == "cuda" and ops.triton_kernels():
            columns.append(("triton", median_seconds(step, device, arguments.rounds)))
        line = "".join(
            f"   {form} {seconds * 1e6:10.1f} us {moved / seconds / peak:6.0%}"
            for form, seconds in columns
        )
        print(f"{device.type:5} {tokens:6} tokens  {name:24}{line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32, 256, 2048])
    parser.add_argument(
        "--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--copy-mib", type=int, help="size of the copy. Default: larger than the caches"
    )
    arguments = parser.parse_args()
    device = arguments.device
    copied = (arguments.copy_mib or {"cpu": 256, "cuda": 1024}[device.type]) << 20
    with torch.inference_mode():
        peak = copy_bandwidth(device, copied, arguments.rounds)
        print(f"{device.type}: a copy moves {peak / 1e9:.1f} GB/s")
        for tokens in arguments.tokens:
            measure(tokens, arguments, device, peak)


if __name__ == "__main__":
    main()
