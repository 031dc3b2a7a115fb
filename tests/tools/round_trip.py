"""Whether what ``tgi quantize`` writes is read alike by other libraries and by us.

    python -m tests.tools.round_trip --gptqmodel PYTHON --transformers PYTHON --vllm PYTHON

Each PYTHON is of an environment that has gptqmodel and compressed-tensors; transformers with
these two and optimum; or vLLM for CPUs. The bundled model is quantized in every format; each
library loads it there, in bfloat16, and says its logits of a text (vLLM its log probabilities, and
the tokens that follow), which are compared with ours in float32 of the same files:

    computed    by the library as it is
    loaded      by the library; its kernels cannot compute it on this machine, so its layers'
                weights were multiplied in plain torch
    refused     with its reason

and the divergence (KL, in nats per token). Ends with 1 if a library does less than FORMATS says,
or differs by more than the dtype explains.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.tools import round_trip_readers
from tests.tools.paged_run import PagedRun, load
from tgi_cli import demo
from tgi_cli.cli.main import run
from tgi_cli.text.tokenizer import Tokenizer

LIBRARIES = tuple(round_trip_readers.READERS)
STATES = ("refused", "loaded", "computed")


@dataclass(frozen=True)
class Format:
    """Flags of ``tgi quantize``, and where less than computing is expected."""

    flags: str
    less: dict[str, str] = field(default_factory=dict)

    def expected(self, library: str) -> str:
        return self.less.get(library, "computed")


_NO_BYTES = {"gptqmodel": "refused"}
FORMATS = {
    "gptq": Format("--groupsize 128"),
    "gptq act-order": Format("--groupsize 32 --act-order", {"vllm": "refused"}),
    "gptq act-order static": Format("--groupsize 32 --act-order --static-groups"),
    "gptq rows": Format("--groupsize -1", {"gptqmodel": "loaded", "transformers": "loaded"}),
    "gptq 8 bits": Format("--bits 8", {"vllm": "loaded"}),
    "gptq 3 bits": Format("--bits 3", {"vllm": "refused"}),
    "gptq_v2 asym": Format("--groupsize 64 --asym --format gptq_v2", {"vllm": "refused"}),
    "gptq plain block": Format("--exclude *.1.*"),
    "awq": Format("--method awq --groupsize 32"),
    "pack-quantized": Format("--format compressed-tensors"),
    "pack-quantized act-order": Format("--format compressed-tensors --act-order --static-groups"),
    "pack-quantized asym": Format(
        "--format compressed-tensors --asym", {"gptqmodel": "refused", "transformers": "refused"}
    ),
    "pack-quantized 8 bits": Format("--format compressed-tensors --bits 8", {"vllm": "loaded"}),
    "fp8": Format("--method fp8", _NO_BYTES),
    "fp8 per tensor": Format("--method fp8 --groupsize 0", _NO_BYTES | {"vllm": "loaded"}),
    "int8": Format("--method int8", _NO_BYTES),
}
LIMIT = 1e-3
"""Of the divergence in nats: activations in bfloat16 take about a fifth of it."""

WIDER = {"fp8": 1e-2, "fp8 per tensor": 1e-2, "int8": 2e-3}
"""Where activations are rounded to 8 bits, too."""

GAP = 0.5
"""In nats: how far a token that another library takes may be behind ours."""


def divergence(a: Tensor, b: Tensor) -> float:
    """Of b's distributions from a's, in nats, on average."""
    p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def our_logits(model: Path, ids: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Float32 [length, vocab]."""
    return PagedRun(load(model, dtype), dtype, "torch").step({"a": ids})["a"].float()


def quantize(out: Path, flags: str) -> None:
    """The bundled model, as the command would."""
    model, sampled = str(demo.model_path()), "--calibration bundled --samples 8 --seq-len 128"
    command = ["quantize", model, str(out), "--device", "cpu", *sampled.split(), *flags.split()]
    # The command prints its folder.
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # noqa: PTH123
        code = run(command)
    if code:
        sys.exit(f"tgi {' '.join(command)} ended with {code}")


def read_by(library: str, python: str, models: list[Path], ids: list[int], out: Path) -> None:
    """Have the library say what it says of all models, in one process; see the readers."""
    out.mkdir()
    asked = {"ids": ids, "models": [str(model) for model in models], "out": str(out)}
    with (out / "log").open("w") as log:
        done = subprocess.run(
            [python, "-P", round_trip_readers.__file__, library, json.dumps(asked)],
            cwd=out,  # gptqmodel writes a log where it is
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        print((out / "log").read_text()[-2000:])
        sys.exit(f"{library}: ended with {done.returncode}")


def judge(name: str, library: str, model: Path, ids: list[int], said: Path) -> bool:
    """Print what came of one checkpoint, and whether it is what FORMATS says."""
    reason = ""
    if (refusal := said.with_suffix(".json")).exists():
        reason = json.loads(refusal.read_text())
    state, close, found = "refused", True, ""
    if said.exists():
        state = "loaded" if reason else "computed"
        tensors = load_file(said)
        tokens = tensors["tokens"].tolist() if "tokens" in tensors else []
        ours, logits = our_logits(model, [*ids, *tokens]), tensors["logits"]
        apart = divergence(ours[: len(logits)], logits)
        close = apart < WIDER.get(name, LIMIT)
        found = f"{apart:.1e}"
        if tokens:
            chances = ours[len(ids) - 1 : -1].log_softmax(-1)
            gaps = chances.max(-1).values - chances[range(len(tokens)), tokens]
            found += f", {int((gaps == 0).sum())} of {len(tokens)} tokens ours"
            found += "" if bool((gaps == 0).all()) else f", others {float(gaps.max()):.2f} behind"
            close &= float(gaps.max()) < GAP
    fine = close and STATES.index(state) >= STATES.index(FORMATS[name].expected(library))
    mark = "" if fine else "  <- NOT AS EXPECTED"
    print(f"{name:25} {library:13} {state:9} {found}{mark}", flush=True)
    if reason:
        print(f"{'':25} {reason}", flush=True)
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.round_trip", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for library in LIBRARIES:
        parser.add_argument(f"--{library}", metavar="PYTHON")
    parser.add_argument("--only", default="", help="formats with this in their name")
    parser.add_argument("--work", type=Path, help="keep checkpoints and logs in this folder")
    options = parser.parse_args()
    ids = Tokenizer.load(demo.model_path()).encode(demo.heldout_text()[:4000])[:256]
    names = [name for name in FORMATS if options.only in name]
    fine = True
    with tempfile.TemporaryDirectory() as folder:
        work: Path = options.work or Path(folder)
        models = [work / name.replace(" ", "-") for name in names]
        for name, model in zip(names, models, strict=True):
            if not model.exists():
                quantize(model, FORMATS[name].flags)
            apart = divergence(our_logits(model, ids), our_logits(model, ids, torch.bfloat16))
            fine &= apart < LIMIT
            print(f"{name:25} {'tgi, bfloat16':13} {'computed':9} {apart:.1e}", flush=True)
        for library in LIBRARIES:
            if python := getattr(options, library):
                said = Path(folder) / f"by-{library}"
                read_by(library, python, models, ids, said)
                if options.work:
                    shutil.copyfile(said / "log", work / f"{library}.log")
                for index, (name, model) in enumerate(zip(names, models, strict=True)):
                    fine &= judge(name, library, model, ids, said / f"{index}.safetensors")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
