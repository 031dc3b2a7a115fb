"""Compare matrix products with packed weights on the CPU: ours, oneDNN's and torch's.

    python -m tests.benchmarks.gemm [--threads 1] [--shapes 576x576 4096x4096] [--rows 1 8 512]

Shapes are inputs x outputs, by default those of a 135M Llama, Qwen3-0.6B and a decoder of width
4096. Each product cycles through 100 MB of copies, so that weights are read from memory, as in a
decode step. All contestants take turns; figures are medians over the rounds, in CPU time with one
thread and in wall time otherwise. ``read`` is ``torch.sum`` over the same bytes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tgi_cli.kernels.linear import linear, pack_bf16, pack_codes
from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.quantization.unquantized import onednn_linear, pack_onednn

SHAPES = [
    *((576, 960), (576, 576), (576, 3072), (1536, 576)),
    *((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024)),
    *((4096, 4096), (4096, 28672), (14336, 4096)),
]
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
MEMORY = 100e6
GROUP = 128
Product = Callable[[Tensor, int], object]


def contestants(inputs: int, outputs: int, copies: int) -> dict[str, tuple[Product, int]]:
    """Return products of x with the i-th copy of a weight, and the bytes of a copy."""
    weight = torch.randn(outputs, inputs).bfloat16()
    codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8)
    scales = torch.rand(outputs, -(-inputs // GROUP))
    nbytes = weight.nbytes
    found: dict[str, tuple[Product, int]] = {}

    def ours(name: str, make: Callable[[], PackedMatrix]) -> None:
        matrices = [make() for _ in range(copies)]
        found[name] = lambda x, i: linear(x, matrices[i]), matrices[0].nbytes
        if name == "bf16":
            wide = [matrix.data.view(torch.float32) for matrix in matrices]
            found["read"] = lambda x, i: torch.sum(wide[i]), nbytes

    ours("bf16", lambda: pack_bf16(weight))
    packed = [pack_onednn(weight) for _ in range(copies)]
    if None not in packed:
        found["onednn"] = lambda x, i: onednn_linear(x, packed[i], None), nbytes  # type: ignore[arg-type]
    plain = [weight.clone() for _ in range(copies)]
    found["linear"] = lambda x, i: F.linear(x, plain[i]), nbytes

    ours("int8", lambda: pack_codes(codes, scales[:, :1], None, 8, 0))
    signed = [codes.view(torch.int8).clone() for _ in range(copies)]
    one = scales[:, 0].bfloat16().contiguous()
    found["torch8"] = lambda x, i: torch._weight_int8pack_mm(x, signed[i], one), nbytes // 2

    small = codes & 15
    ours("int4", lambda: pack_codes(small, scales, None, 4, GROUP))
    if inputs % GROUP == 0:
        wide = small.int()
        torch4 = [torch._convert_weight_to_int4pack_for_cpu(wide, 1) for _ in range(copies)]
        both = torch.stack((scales.T, torch.zeros_like(scales.T)), dim=-1).bfloat16().contiguous()
        found["torch4"] = (
            lambda x, i: torch._weight_int4pack_mm_for_cpu(x, torch4[i], GROUP, both),
            nbytes // 4,
        )
    return found


def measure(
    found: dict[str, tuple[Product, int]], x: Tensor, copies: int, rounds: int
) -> dict[str, float]:
    """Return the median seconds of each product."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, (product, _) in found.items():
            start = clock()
            for i in range(copies):
                product(x, i)
            taken[name].append((clock() - start) / copies)
    return {name: statistics.median(times) for name, times in taken.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shapes", nargs="+", default=[f"{k}x{n}" for k, n in SHAPES])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", help="only these contestants")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    for shape in arguments.shapes:
        inputs, outputs = map(int, shape.split("x"))
        copies = max(1, round(MEMORY / (inputs * outputs * 2)))
        found = contestants(inputs, outputs, copies)
        if arguments.only:
            found = {name: found[name] for name in arguments.only if name in found}
        print(f"\n{shape}, {arguments.threads} threads: microseconds (GB/s of weights, GFLOP/s)")
        print("rows  " + "".join(f"{name:>24}" for name in found))
        for rows in arguments.rows:
            x = torch.randn(rows, inputs).bfloat16()
            # With many rows, products are compute-bound and need fewer copies.
            times = measure(found, x, max(1, copies * 8 // max(rows, 8)), arguments.rounds)
            cells = []
            for name, seconds in times.items():
                flops = 0 if name == "read" else 2 * rows * inputs * outputs
                rate = f"({found[name][1] / seconds / 1e9:.1f}, {flops / seconds / 1e9:.0f})"
                cells.append(f"{seconds * 1e6:10.1f} {rate:>13}")
            print(f"{rows:<6}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
