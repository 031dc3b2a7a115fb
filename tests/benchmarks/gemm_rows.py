"""Compare matrix products by number of rows and kind of weights, of several builds of the kernels.

    python -m tests.benchmarks.gemm_rows [--against LIBRARY.so ...] [--threads 1] [--seconds 40]
        [--shapes 576x3072 1024x6144] [--kinds bf16 int8 int4] [--rows 1 2 4 8 12 16 32 64]

Weights are those of several layers, cycled so that they come from memory. Each cell is the median
of the microseconds of a product (CPU time with one thread, else wall time); all cells take turns
until the time is up, so that other load on the machine affects them alike. ``int8 a8`` and
``int4 a8`` round activations to 8 bits; types of GGUF are kinds, too (``Q4_K``, ``Q4_K a8``). With
``--against``, cells are ``this build / another ...``; builds are the files
``tgi-kernels-DIGEST-LEVEL.so`` in ``~/.cache/tgi/kernels``.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tgi_cli.gguf.tensor_types import TENSOR_TYPES
from tgi_cli.kernels import cpp_library, library
from tgi_cli.kernels.linear import linear, pack_bf16, pack_codes, quantize_inputs
from tgi_cli.kernels.memory import allocate
from tgi_cli.kernels.packed_matrix import MatrixStruct, PackedMatrix
from tgi_cli.quantization.block_weight import BlockWeight
from tgi_cli.quantization.gguf import LAYOUTS

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 32, 64)
SHAPES = ("576x3072", "1024x6144")
KINDS = ("bf16", "int8", "int4", "int8 a8", "int4 a8", "nf4", "fp8")
MEMORY = 80e6
"""Bytes of weights to cycle through: more than the caches hold."""
GROUP = 64


@contextmanager
def using(build: ctypes.CDLL) -> Iterator[None]:
    """Compute with a build of the kernels within the block."""
    before, library._load = library._load, lambda: build  # type: ignore[assignment]
    try:
        yield
    finally:
        library._load = before


def pack(kind: str, inputs: int, outputs: int) -> PackedMatrix | None:
    """Return a random weight of a kind, or None if this build does not have the kind."""
    if kind == "bf16":
        return pack_bf16(torch.randn(outputs, inputs).bfloat16())
    name, _, narrow = kind.partition(" ")
    if name in LAYOUTS:
        found = pack_gguf(name, inputs, outputs)
        return None if found and narrow and not quantize_inputs(found) else found
    bits = 4 if name in ("int4", "nf4") else 8
    group = GROUP if bits == 4 else 0
    codes = torch.randint(0, 2**bits - 16 * (name == "fp8"), (outputs, inputs), dtype=torch.uint8)
    if name == "fp8":
        codes &= 0x7E  # without NaN
    table = torch.linspace(-1, 1, 16).bfloat16() if name == "nf4" else None
    scales = torch.rand(outputs, -(-inputs // group) if group else 1)
    matrix = pack_codes(codes, scales, None, bits, group, table=table, e4m3=name == "fp8")
    if narrow and not (hasattr(cpp_library(), "tgi_multiplies_bytes") and quantize_inputs(matrix)):
        return None
    return matrix


def pack_gguf(name: str, inputs: int, outputs: int) -> PackedMatrix | None:
    """Return random blocks of a type, or None if rows are no whole blocks."""
    kind = next(kind for kind in TENSOR_TYPES.values() if kind.name == name)
    if inputs % kind.elements or not hasattr(cpp_library(), "tgi_pack_gguf"):
        return None
    row = inputs // kind.elements * kind.size
    blocks = torch.randint(0, 32, (outputs, row), dtype=torch.uint8)  # scales are finite
    return BlockWeight(kind, (blocks,)).pack(paired=False)


def copy_of(matrix: PackedMatrix) -> PackedMatrix:
    """Return a matrix with the same numbers and scales elsewhere in memory."""
    struct = MatrixStruct.from_buffer_copy(matrix.struct)
    fields = ("data", "scales", "zeros", "scale_codes", "minimum_codes")
    kept = {tensor.data_ptr(): tensor for tensor in matrix.tensors}
    copies = []
    for field in fields:
        if (address := getattr(struct, field)) is not None:
            tensor = kept[address]
            copy = allocate(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)
            setattr(struct, field, copy.data_ptr())
            copies.append(copy)
    data, *others = copies
    return replace(
        matrix, data=data, levels=tuple(others), struct=struct, address=ctypes.addressof(struct)
    )


def product(matrices: list[PackedMatrix], x: Tensor) -> Callable[[], float]:
    """Return a function that computes the next of the products and returns its microseconds."""
    turn = 0
    clock = time.thread_time if library.threads() == 1 else time.perf_counter

    def run() -> float:
        nonlocal turn
        matrix = matrices[turn % len(matrices)]
        turn += 1
        began = clock()
        linear(x, matrix)
        return 1e6 * (clock() - began)

    return run


def measure(
    builds: list[ctypes.CDLL], shape: str, kinds: list[str], rows: list[int], seconds: float
) -> dict[tuple[int, str, int], float]:
    """Return median microseconds by build, kind and number of rows."""
    inputs, outputs = map(int, shape.split("x"))
    products: dict[tuple[int, str, int], Callable[[], float]] = {}
    for number, build in enumerate(builds):
        with using(build):
            for kind in kinds:
                first = pack(kind, inputs, outputs)
                if first is None:
                    continue
                copies = max(1, round(MEMORY / first.nbytes))
                matrices = [first, *(copy_of(first) for _ in range(copies - 1))]
                for count in rows:
                    x = torch.randn(count, inputs).bfloat16()
                    products[number, kind, count] = product(matrices, x)
    taken: dict[tuple[int, str, int], list[float]] = {cell: [] for cell in products}
    order, end = list(products), time.monotonic() + seconds
    while time.monotonic() < end:
        random.Random(len(taken[order[0]])).shuffle(order)
        for cell in order:
            with using(builds[cell[0]]):
                taken[cell] += [products[cell]() for _ in range(6)][2:]  # the first find other code
    return {cell: statistics.median(each) for cell, each in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--against", type=Path, nargs="+", default=[], help="other builds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=40.0, help="for each shape")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="inputs x outputs")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=[*KINDS, *LAYOUTS, *(f"{each} a8" for each in LAYOUTS)],
        default=list(KINDS[:5]),
    )
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    options = parser.parse_args()
    ours = cpp_library()
    if ours is None:
        raise SystemExit("the kernels were not compiled: python -m tgi_cli.kernels")
    library.set_threads(options.threads)
    builds = [ours, *map(library.open_library, options.against)]
    for shape in options.shapes:
        found = measure(builds, shape, options.kinds, options.rows, options.seconds)
        print(f"\n{shape}, {options.threads} threads, microseconds (times one row)\n")
        print(f"| rows | {' | '.join(options.kinds)} |")
        print("|---" * (len(options.kinds) + 1) + "|")
        for count in options.rows:
            cells = []
            for kind in options.kinds:
                cell = ""
                for number in range(len(builds)):
                    if (number, kind, count) in found:
                        each = found[number, kind, count]
                        times = each / found[number, kind, options.rows[0]]
                        text = f"{each:.0f} ({times:.2f})"
                        cell += f" / {text}" if number else text
                cells.append(cell)
            print(f"| {count} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
