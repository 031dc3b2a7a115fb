"""The command line, and the contestants that it selects."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.peers.columns import CONTEXTS, LONG_NEW, NEW, PREFILLS, PROMPT
from tests.benchmarks.peers.contestant import Contestant
from tests.benchmarks.peers.gguf_files import GGUFFiles
from tests.benchmarks.peers.hf_generate import Transformers
from tests.benchmarks.peers.llama_cpp import LlamaCpp
from tests.benchmarks.peers.openvino import OpenVino
from tests.benchmarks.peers.tgi import Tgi, TgiGGUF
from tests.benchmarks.peers.vllm import Vllm
from tests.tools.published_shapes import PUBLISHED

MODELS = ("small", "qwen06", *PUBLISHED)
DEFAULT_MODELS = ("small", "qwen06")
GGUF_TYPES = ("q4_0", "q8_0", "q4_k_m")
PEERS = ("tgi", "openvino", "vllm", "llama.cpp", "transformers")


@dataclass(frozen=True)
class Ours:
    """A contestant of ours, from ``NAME=CHECKPOINT[: FLAGS]`` of the command line."""

    name: str
    checkpoint: str
    flags: str = ""


PLAIN = (Ours("tgi", "{checkpoint}"),)
QUANTIZED = (
    Ours("tgi int8", "{checkpoint}", "--quantize int8"),
    Ours(
        "tgi int8, 16-bit activations",
        "{checkpoint}",
        "--quantize int8 --no-quantize-activations",
    ),
    Ours("tgi int8, head too", "{checkpoint}", "--quantize int8 --quantize-head"),
    Ours("tgi int4", "{gptq4}"),
    Ours("tgi int4, 16-bit activations", "{gptq4}", "--no-quantize-activations"),
    Ours("tgi int4, head of 8", "{gptq4}", "--quantize-head"),
    Ours("tgi int4, head of 4", "{gptq4}", "--quantize-head-bits 4"),
)


def ours(text: str) -> Ours:
    """Parse ``NAME=CHECKPOINT[: FLAGS]``; the first colon ends the checkpoint."""
    name, equals, rest = text.partition("=")
    checkpoint, _, flags = rest.partition(":")
    if not (name and equals and checkpoint):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=CHECKPOINT[: FLAGS]")
    return Ours(name, checkpoint.strip(), flags.strip())


def peer_path(text: str) -> tuple[str, Path]:
    """Parse ``PEER=PATH``, a peer and the environment or folder that it is installed in."""
    name, equals, path = text.partition("=")
    if name not in PEERS or not equals or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not PEER=PATH of {', '.join(PEERS)}")
    return name, Path(path).absolute()


def named_megabytes(text: str) -> tuple[str, int]:
    """Parse ``NAME=MB`` to a name and bytes."""
    name, equals, megabytes = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=MB")
    return name, int(float(megabytes) * 1e6)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.peers",
        description="Compare serving speed on a CPU with other engines, in one run.",
    )
    add = parser.add_argument
    add("work", type=Path, help="folder for checkpoints, conversions and logs")
    add(
        "--model",
        dest="models",
        choices=MODELS,
        action="append",
        help=f"model to measure; repeatable [{' '.join(DEFAULT_MODELS)}]",
    )
    add(
        "--peer",
        dest="peers",
        type=peer_path,
        action="append",
        default=[],
        metavar="PEER=PATH",
        help="its virtual environment (tgi: another revision's), or llama.cpp's build folder",
    )
    add(
        "--exporter",
        type=Path,
        metavar="PATH",
        help="environment with optimum-intel, to convert for openvino [openvino's]",
    )
    add(
        "--tgi",
        dest="ours",
        type=ours,
        action="append",
        metavar="NAME=CHECKPOINT[: FLAGS]",
        help="our contestant; {checkpoint} is the unquantized one, {gptq4}, {gptq8} are derived; "
        "with --gguf, {gguf} is the file",
    )
    add(
        "--tgi-python",
        type=Path,
        default=Path(sys.executable),
        metavar="PATH",
        help="interpreter for our contestants [this one]",
    )
    add(
        "--weight-mb",
        type=named_megabytes,
        action="append",
        default=[],
        metavar="NAME=MB",
        help="weights that our contestant reads per token, if not derived from its checkpoint",
    )
    add("--quantized", action="store_true", help="weights of 4 and 8 bits instead of bf16")
    add(
        "--gguf",
        nargs="*",
        metavar="TYPE",
        help="only tgi and llama.cpp, both with the same GGUF file of each type of "
        f"llama-quantize [{' '.join(GGUF_TYPES)}]",
    )
    add("--long", action="store_true", help="long contexts instead of waves")
    add("--concurrency", type=int, nargs="*", default=[1, 8, 32])
    add("--prefill", type=int, nargs="*", default=list(PREFILLS), help="lengths of single prompts")
    add("--contexts", type=int, nargs="*", default=list(CONTEXTS), help="with --long")
    add("--prompt", type=int, default=PROMPT, help="prompt tokens of a request in a wave")
    add("--new", type=int, help=f"output tokens of a request [{NEW}; with --long {LONG_NEW}]")
    add("--rounds", type=int, default=3)
    add("--foreign", type=float, default=0.08, help="CPU share that other programs may use")
    add("--retries", type=int, default=2, help="retries of figures above it")
    add("--timeout", type=float, default=900, help="timeout of a wave in seconds")
    add(
        "--skip",
        action="append",
        default=[],
        metavar="CONTESTANT:COLUMN",
        help="skip a figure that takes too long, such as transformers:c32",
    )
    add("--output", type=Path, help="save all values as JSON")
    return parser


def contestants(arguments: argparse.Namespace) -> list[Contestant]:
    """Return our contestants, then the peers."""
    python, bytes_ = arguments.tgi_python, dict(arguments.weight_mb)
    if arguments.gguf is not None:
        mine = arguments.ours or [Ours("tgi", "{gguf}", "")]
        return _with_same_file(arguments.gguf or GGUF_TYPES, dict(arguments.peers), python, mine)
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


def _with_same_file(
    types: Sequence[str], peers: dict[str, Path], python: Path, mine: Sequence[Ours]
) -> list[Contestant]:
    """Return ours and llama.cpp for each type of GGUF file."""
    if peers.keys() != {"llama.cpp"}:
        raise SystemExit("--gguf needs --peer llama.cpp=BUILD, and no other peer")
    build = peers["llama.cpp"]
    files = GGUFFiles(build, python)
    found: list[Contestant] = []
    for weights in types:
        for one in mine:
            if one.checkpoint != "{gguf}":
                raise SystemExit("with --gguf, the checkpoint of --tgi is {gguf}")
            name = f"{one.name} {weights}"
            found.append(TgiGGUF(name, python, files, weights, one.flags))
        found.append(LlamaCpp(build, weights, python))
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
