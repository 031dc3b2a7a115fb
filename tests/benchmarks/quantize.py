"""Measure the accuracy and cost of quantization by method, bits, group size and column order.

    python -m tests.benchmarks.quantize                       the bundled model and a trained one
    python -m tests.benchmarks.quantize --model FOLDER        another model
    python -m tests.benchmarks.quantize --gptqmodel PYTHON    also gptqmodel, in its environment
    python -m tests.benchmarks.quantize --big FOLDER          peak memory for a large checkpoint

Each setting runs in a process of its own, whose total time and peak memory are reported, including
imports. Perplexity, KL divergence from the float32 original and top-1 agreement are evaluated on
held-out text. The trained model is created once in --work by tests/tools/trained_model.py, which
takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.tools import trained_model
from tgi_cli import demo

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    name: str
    flags: tuple[str, ...]
    theirs: dict[str, Any] | None = None
    """The equivalent settings of gptqmodel, or None to skip it."""


@dataclass
class Row:
    """The results of a setting."""

    seconds: float
    peak_mib: float
    evaluation: dict[str, Any] = field(default_factory=dict)


def _gptq(bits: int, group: int, order: bool = False, sym: bool = True) -> Setting:
    flags = ["--method", "gptq", "--bits", str(bits), "--groupsize", str(group)]
    flags += ["--act-order"] * order + ["--asym"] * (not sym)
    name = f"gptq {bits}/{group}" + " act-order" * order + " asym" * (not sym)
    theirs: dict[str, Any] = {"bits": bits, "group_size": group, "desc_act": order, "sym": sym}
    theirs["act_group_aware"] = not order
    if not sym:
        theirs["format"] = "gptq_v2"
    return Setting(name, tuple(flags), theirs)


def _rtn(bits: int, group: int) -> Setting:
    flags = ("--method", "rtn", "--bits", str(bits), "--groupsize", str(group))
    return Setting(f"rtn {bits}/{group}", flags)


SETTINGS = (
    *(_gptq(bits, 128) for bits in (2, 3, 4, 8)),
    _gptq(4, 128, order=True),
    _gptq(4, 128, sym=False),
    _gptq(4, 32),
    _gptq(4, 32, order=True, sym=False),
    Setting("gptq 4/128 mse", ("--mse",)),
    Setting(
        "gptq 4/128 no order",
        ("--no-group-aware",),
        {"bits": 4, "group_size": 128, "desc_act": False, "sym": True, "act_group_aware": False},
    ),
    Setting("awq 4/128", ("--method", "awq")),
    Setting("awq 4/32", ("--method", "awq", "--groupsize", "32")),
    *(_rtn(bits, 128) for bits in (2, 3, 4, 8)),
    Setting("fp8", ("--method", "fp8")),
    Setting("int8", ("--method", "int8")),
)

# Not ru_maxrss: a child process inherits its parent's.
PEAK = """
def peak():
    with open("/proc/self/status") as status:
        return int(status.read().split("VmHWM:")[1].split()[0]) / 1024
"""

PROGRAM = f"""
import json, sys
{PEAK}
from tgi_cli.cli.main import run
code = run(json.loads(sys.argv[1]))
print(json.dumps({{"code": code, "peak": peak()}}))
"""

THEIRS = f"""
import json, os, sys, time
{PEAK}
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
import torch
from gptqmodel import GPTQModel, QuantizeConfig
job = json.loads(sys.argv[1])
rows = [{{"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()}}
        for ids in json.load(open(job["samples"]))]
model = GPTQModel.load(job["model"], QuantizeConfig(device="cpu", **job["settings"]))
began = time.monotonic()
model.quantize(rows, batch_size=1)
seconds = time.monotonic() - began
model.save(job["out"])
print()
print(json.dumps({{"seconds": seconds, "peak": peak()}}))
"""


def ours(model: Path, out: Path, flags: list[str]) -> Row:
    """Run ``tgi quantize`` in a process of its own."""
    arguments = ["quantize", str(model), str(out), *flags, "--json-output"]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    seconds = time.monotonic() - began
    *_, result, facts = map(json.loads, done.stdout.splitlines())
    return Row(seconds, facts["peak"], result["evaluation"] or {})


def theirs(python: str, model: Path, out: Path, samples: Path, settings: dict[str, Any]) -> Row:
    """Quantize with gptqmodel and the same samples, and evaluate the result."""
    job = {
        "model": str(model),
        "out": str(out),
        "samples": str(samples),
        "settings": settings,
    }
    done = subprocess.run(
        [python, "-c", THEIRS, json.dumps(job)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": ""},
    )
    facts = json.loads(done.stdout.splitlines()[-1])
    return Row(facts["seconds"], facts["peak"], _evaluated(model, out))


def _evaluated(model: Path, out: Path) -> dict[str, Any]:
    from dataclasses import asdict

    import torch

    from tgi_cli.quantize.calibration import heldout_windows
    from tgi_cli.quantize.evaluation import WINDOW, evaluate

    return asdict(evaluate(model, out, heldout_windows(model, WINDOW), torch.device("cpu")))


def _samples(model: Path, options: argparse.Namespace, work: Path) -> Path:
    """Write the calibration token ids of ``tgi quantize`` with these flags; return the path."""
    from tgi_cli.quantize.calibration import load_calibration
    from tgi_cli.quantize.options import QuantizeOptions

    settings = QuantizeOptions(
        model_id=str(model),
        calibration=options.calibration,
        samples=options.samples,
        seq_len=options.seq_len,
    )
    found = load_calibration(model, settings, context=1 << 20)
    path = work / "samples.json"
    path.write_text(json.dumps(found.ids.tolist()))
    return path


def table(model: Path, options: argparse.Namespace, work: Path) -> Iterator[str]:
    """Yield the Markdown table of a model, line by line."""
    samples = _samples(model, options, work)
    yield "| setting | KL | top-1 | perplexity | MiB | seconds | peak MiB |"
    yield "|---|---|---|---|---|---|---|"
    flags = ["--calibration", options.calibration, "--samples", str(options.samples)]
    flags += ["--seq-len", str(options.seq_len), "--evaluate", "--device", "cpu"]
    for setting in SETTINGS:
        if options.only and options.only not in setting.name:
            continue
        with tempfile.TemporaryDirectory(dir=work) as folder:
            row = ours(model, Path(folder) / "out", [*flags, *setting.flags])
            yield _line(setting.name, row)
            if options.gptqmodel and setting.theirs is not None:
                out = Path(folder) / "theirs"
                other = theirs(options.gptqmodel, model, out, samples, setting.theirs)
                ratio = row.evaluation["kl"] / other.evaluation["kl"]
                yield _line(f"gptqmodel {setting.name[5:]} (ours / theirs: {ratio:.2f})", other)


def _line(name: str, row: Row) -> str:
    found = row.evaluation
    return (
        f"| {name} | {found['kl']:.2e} | {found['top1']:.4f} | {found['perplexity']:.3f} "
        f"| {found['num_bytes'] / 2**20:.2f} | {row.seconds:.1f} | {row.peak_mib:.0f} |"
    )


def big(model: Path, options: argparse.Namespace, work: Path) -> Iterator[str]:
    """Yield a table of peak memory and time for a large checkpoint, which needs no tokenizer."""
    yield "| method | seconds | peak MiB |"
    yield "|---|---|---|"
    for method in ("gptq", "awq", "int8"):
        if options.only and options.only not in method:
            continue
        with tempfile.TemporaryDirectory(dir=work) as folder:
            flags = ["--method", method, "--calibration", options.calibration, "--device", "cpu"]
            flags += ["--samples", str(options.samples), "--seq-len", str(options.seq_len)]
            row = ours(model, Path(folder) / "out", flags)
            yield f"| {method} | {row.seconds:.0f} | {row.peak_mib:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.quantize")
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, action="append")
    parser.add_argument(
        "--gptqmodel", metavar="PYTHON", help="interpreter of an environment with gptqmodel"
    )
    parser.add_argument("--big", type=Path, metavar="FOLDER")
    parser.add_argument("--calibration", default="bundled")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--only", help="only settings whose names contain this text")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "tgi-quantize")
    options = parser.parse_args()
    options.work.mkdir(exist_ok=True)
    if options.big is not None:
        for line in big(options.big, options, options.work):
            print(line, flush=True)
        return
    models = options.model or [demo.model_path(), options.work / "trained"]
    for model in models:
        if not model.exists():
            print(f"training {model}", file=sys.stderr)
            trained_model.train(model)
        print(f"\n{model.name}: {options.samples} samples of {options.seq_len} tokens\n")
        for line in table(model, options, options.work):
            print(line, flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"\n{used.ru_utime + used.ru_stime:.0f} s of CPU time in total", file=sys.stderr)


if __name__ == "__main__":
    main()
