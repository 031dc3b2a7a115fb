"""Check and measure the engine on a GPU.

Needs the repository, torch with its Triton, safetensors and tokenizers. ``check`` leaves out the
families of models without transformers, and the tests of kernels and graphs without pytest.

    python -m tests.benchmarks.gpu check --out figures     # kernels, graphs, parity with the CPU
    python -m tests.benchmarks.gpu speed --out figures     # steps and workloads, and the limits
    python -m tests.benchmarks.gpu peers --out figures     # other engines, if they are installed
    python -m tests.benchmarks.gpu speed --device cpu --shape tiny   # try it without a GPU

Each call ends within nine minutes. It writes figures to OUT/CALL.json and OUT/CALL.md after each
section, so that nothing is lost if it is cut off, and prints them. A section that fails is
reported with the error, and the others still run; one for which too little time is left is not
begun. Sections run in a process of their own: one that hangs is ended after its limit, with a
traceback, and those behind it run in another process, as they do after a crash or an error that
leaves the device unusable. ``--only`` names sections. Models have random weights and no tokenizer,
and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.benchmarks.gpu import check, peers, shapes, speed
from tests.benchmarks.gpu.sections import Call
from tests.benchmarks.gpu.supervisor import supervise

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
    parser.add_argument(
        "--one-process", action="store_true", help="run the sections in this process"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the sections that OUT has, with --one-process"
    )
    options = parser.parse_args(arguments)
    sections = CALLS[options.call]
    names = [section.name for section in sections]
    unknown = set(options.only or ()).difference(names)
    if unknown:
        parser.error(f"no sections {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not options.one_process:

        def command(left: Sequence[str], minutes: float, resumed: bool) -> list[str]:
            return [
                *(sys.executable, "-m", "tests.benchmarks.gpu", options.call, "--one-process"),
                *("--minutes", str(minutes), "--out", str(options.out)),
                *("--device", options.device, "--shape", options.shape),
                *(["--resume"] if resumed else []),
                *("--only", *left),
            ]

        if options.device == "cuda" and not torch.cuda.is_available():
            print("torch finds no CUDA device: nothing to measure")
            return 0
        wanted = [name for name in names if options.only is None or name in options.only]
        return supervise(options.call, wanted, options.out, options.minutes, command)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    call = Call(
        options.call, options.device, options.out, options.minutes, options.shape, options.resume
    )
    return call.run(sections, options.only)


if __name__ == "__main__":
    raise SystemExit(main())
