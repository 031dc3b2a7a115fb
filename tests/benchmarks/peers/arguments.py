"""The command line: who takes part, and in what."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.peers.columns import CONTEXTS, LONG_NEW, NEW, PREFILLS, PROMPT
from tests.benchmarks.peers.contestant import Contestant
from tests.benchmarks.peers.hf_generate import Transformers
from tests.benchmarks.peers.llama_cpp import LlamaCpp
from tests.benchmarks.peers.openvino import OpenVino
from tests.benchmarks.peers.tgi import Tgi
from tests.benchmarks.peers.vllm import Vllm

MODELS = {"small": "135m", "qwen06": "qwen3-0.6b"}
PEERS = ("tgi", "openvino", "vllm", "llama.cpp", "transformers")


@dataclass(frozen=True)
class Ours:
    """``NAME=CHECKPOINT[: FLAGS]`` of the command line."""

    name: str
    checkpoint: str
    flags: str = ""


PLAIN = (Ours("tgi", "{checkpoint}"),)
QUANTIZED = (
    Ours("tgi int8", "{checkpoint}", "--quantize int8"),
    Ours("tgi int8, head too", "{checkpoint}", "--quantize int8 --quantize-head"),
    Ours("tgi int4", "{gptq4}"),
    Ours("tgi int4, head of 8", "{gptq4}", "--quantize-head"),
)


def ours(text: str) -> Ours:
    """Read ``NAME=CHECKPOINT[: FLAGS]``; the first colon ends the checkpoint."""
    name, equals, rest = text.partition("=")
    checkpoint, _, flags = rest.partition(":")
    if not (name and equals and checkpoint):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=CHECKPOINT[: FLAGS]")
    return Ours(name, checkpoint.strip(), flags.strip())


def place(text: str) -> tuple[str, Path]:
    """Read ``PEER=PATH``, a peer and the environment or folder that it is installed in."""
    name, equals, path = text.partition("=")
    if name not in PEERS or not equals or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not PEER=PATH of {', '.join(PEERS)}")
    return name, Path(path).absolute()


def amount(text: str) -> tuple[str, int]:
    """Read ``NAME=MB``."""
    name, equals, megabytes = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=MB")
    return name, int(float(megabytes) * 1e6)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.peers",
        description="Serving speed on a CPU, side by side with other engines, in one run.",
    )
    add = parser.add_argument
    add("work", type=Path, help="folder that keeps checkpoints, conversions and logs")
    add("--model", dest="models", choices=MODELS, action="append", help="all of them otherwise")
    add(
        "--peer",
        dest="peers",
        type=place,
        action="append",
        default=[],
        metavar="PEER=PATH",
        help="a virtual environment (tgi: of another revision); llama.cpp: its build folder",
    )
    add(
        "--exporter",
        type=Path,
        metavar="PATH",
        help="environment with optimum-intel, which converts for openvino; its own otherwise",
    )
    add(
        "--tgi",
        dest="ours",
        type=ours,
        action="append",
        metavar="NAME=CHECKPOINT[: FLAGS]",
        help="one of ours; {checkpoint} is the run's own, {gptq4} and {gptq8} are made of it",
    )
    add(
        "--tgi-python",
        type=Path,
        default=Path(sys.executable),
        metavar="PATH",
        help="the interpreter that runs ours [this one]",
    )
    add(
        "--weight-mb",
        type=amount,
        action="append",
        default=[],
        metavar="NAME=MB",
        help="weights that one of ours reads a token, if its checkpoint does not say it",
    )
    add("--quantized", action="store_true", help="peers' weights of 4 and 8 bits, not bf16")
    add("--long", action="store_true", help="long contexts instead of waves")
    add("--concurrency", type=int, nargs="*", default=[1, 8, 32])
    add("--prefill", type=int, nargs="*", default=list(PREFILLS), help="lengths of prompts alone")
    add("--contexts", type=int, nargs="*", default=list(CONTEXTS), help="with --long")
    add("--prompt", type=int, default=PROMPT, help="tokens of a wave's prompts")
    add("--new", type=int, help=f"tokens of its answers [{NEW}; with --long {LONG_NEW}]")
    add("--rounds", type=int, default=3)
    add("--foreign", type=float, default=0.08, help="share of the cores that others may take")
    add("--retries", type=int, default=2, help="of figures that are above it")
    add("--timeout", type=float, default=900, help="seconds for a wave")
    add(
        "--skip",
        action="append",
        default=[],
        metavar="CONTESTANT:COLUMN",
        help="leave out a figure that takes too long, such as transformers:c32",
    )
    add("--output", type=Path, help="save every value as JSON")
    return parser


def contestants(arguments: argparse.Namespace) -> list[Contestant]:
    """Ours, then the peers."""
    python, bytes_ = arguments.tgi_python, dict(arguments.weight_mb)
    mine = arguments.ours or (QUANTIZED if arguments.quantized else PLAIN)
    found: list[Contestant] = [
        Tgi(one.name, python, one.checkpoint, one.flags, bytes_.get(one.name)) for one in mine
    ]
    for name, path in arguments.peers:
        found += _peer(name, path, arguments.quantized, arguments.exporter or path, python)
    names = [contestant.name for contestant in found]
    if len(set(names)) < len(names):
        raise SystemExit(f"names must differ: {', '.join(names)}")
    return found


def _peer(
    name: str, path: Path, quantized: bool, exporter: Path, python: Path
) -> Sequence[Contestant]:
    makers: dict[str, Callable[[str], Contestant]] = {
        "tgi": lambda weights: Tgi(path.parent.name, path / "bin" / "python", root=None),
        "openvino": lambda weights: OpenVino(path, weights, exporter),
        "vllm": lambda weights: Vllm(path),
        "llama.cpp": lambda weights: LlamaCpp(path, weights, python),
        "transformers": lambda weights: Transformers(path),
    }
    small = {"openvino": ("int8",), "llama.cpp": ("q8_0", "q4_0")}
    return [makers[name](weights) for weights in (small.get(name, ()) if quantized else ("bf16",))]
