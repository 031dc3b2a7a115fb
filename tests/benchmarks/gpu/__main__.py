"""Check and measure the engine on a GPU. Needs only the repository, torch and its Triton.

    python -m tests.benchmarks.gpu check --out figures     # kernels, graphs, parity with the CPU
    python -m tests.benchmarks.gpu speed --out figures     # steps and workloads, and the limits
    python -m tests.benchmarks.gpu peers --out figures     # other engines, if they are installed
    python -m tests.benchmarks.gpu speed --device cpu --shape tiny   # try it without a GPU

Each call ends within nine minutes. It writes figures to OUT/CALL.json and OUT/CALL.md after each
section, so that nothing is lost if it is cut off, and prints them. A section that fails is
reported with the error, and the others still run; one for which too little time is left is not
begun. ``--only`` names sections. Models have random weights and no tokenizer.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

import torch

from tests.benchmarks.gpu import check, peers, shapes, speed
from tests.benchmarks.gpu.sections import Call

CALLS = {"check": check.SECTIONS, "speed": speed.SECTIONS, "peers": peers.SECTIONS}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("call", choices=CALLS)
    parser.add_argument("--only", nargs="+", help="run only these sections")
    parser.add_argument("--minutes", type=float, default=8.5, help="time limit")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "figures")))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=sorted(shapes.SHAPES), default="8b")
    options = parser.parse_args(arguments)
    sections = CALLS[options.call]
    unknown = set(options.only or ()).difference(section.name for section in sections)
    if unknown:
        names = ", ".join(section.name for section in sections)
        parser.error(f"no sections {', '.join(sorted(unknown))}; there are: {names}")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device: nothing to measure")
        return 0
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    call = Call(options.call, options.device, options.out, options.minutes, options.shape)
    return call.run(sections, options.only)


if __name__ == "__main__":
    raise SystemExit(main())
