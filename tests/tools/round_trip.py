"""Whether what ``tgi quantize`` writes is read alike by the libraries that own the formats.

    python -m tests.tools.round_trip --gptqmodel PYTHON --transformers PYTHON

Each PYTHON is of an environment that has gptqmodel, or transformers with compressed-tensors. The
bundled model is quantized in every format; the library loads it there and says its logits, which
are compared with ours (float32) of the same files. Ends with 1 if any differ by more than the
dtype explains.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.tools.paged import PagedRun, load
from tgi_cli import demo
from tgi_cli.cli.main import run
from tgi_cli.text.tokenizer import Tokenizer

GPTQMODEL = {
    "gptq": ["--groupsize", "128"],
    "gptq act-order": ["--groupsize", "32", "--act-order"],
    "gptq_v2 asym": ["--groupsize", "64", "--asym", "--format", "gptq_v2"],
    "gptq 8 bits": ["--bits", "8"],
    "gptq with plain layers": ["--exclude", "*.1.*", "--exclude", "*.q_proj"],
    "awq": ["--method", "awq", "--groupsize", "32"],
}
TRANSFORMERS = {
    "pack-quantized": ["--format", "compressed-tensors"],
    "pack-quantized act-order": [
        *("--format", "compressed-tensors", "--act-order", "--static-groups"),
    ],
    "fp8": ["--method", "fp8"],
    "int8": ["--method", "int8"],
}
"""With zeros transformers 5.23 and compressed-tensors 0.20 do not load what the latter writes."""
LIMIT = 1e-3
"""Of the divergence in nats: activations in bfloat16 take about a fifth of it."""

WIDER = {"fp8": 1e-2, "int8": 2e-3}
"""Where transformers rounds activations to 8 bits, too."""

PROGRAMS = {
    "gptqmodel": """
import json, os, sys
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
import torch
from safetensors.torch import save_file
from gptqmodel import BACKEND, GPTQModel
asked = json.loads(sys.argv[1])
model = GPTQModel.load(asked["model"], device="cpu", dtype=torch.bfloat16)
with torch.no_grad():
    logits = model.model(torch.tensor([asked["ids"]])).logits[0].float()
save_file({"logits": logits.contiguous()}, asked["out"])
""",
    "transformers": """
import json, sys
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
asked = json.loads(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.bfloat16)
with torch.no_grad():
    logits = model(torch.tensor([asked["ids"]])).logits[0].float()
save_file({"logits": logits.contiguous()}, asked["out"])
""",
}


def divergence(a: Tensor, b: Tensor) -> float:
    """Of b's distributions from a's, in nats, on average."""
    p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def check(library: str, python: str, name: str, flags: list[str], ids: list[int]) -> bool:
    """Quantize, load there and here, compare."""
    with tempfile.TemporaryDirectory() as folder:
        out, said = Path(folder) / "out", Path(folder) / "logits.safetensors"
        sampled = ["--calibration", "bundled", "--samples", "16", "--seq-len", "128"]
        with open(os.devnull, "w") as nowhere:  # noqa: PTH123 (the command prints its folder)
            kept, sys.stdout = sys.stdout, nowhere
            try:
                model = str(demo.model_path())
                code = run(["quantize", model, str(out), "--device", "cpu", *sampled, *flags])
            finally:
                sys.stdout = kept
        if code:
            print(f"{library:14} {name:26} cannot be quantized: {code}")
            return False
        asked = {"model": str(out), "ids": ids, "out": str(said)}
        done = subprocess.run(
            [python, "-c", PROGRAMS[library], json.dumps(asked)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            print(f"{library:14} {name:26} cannot be loaded:\n{done.stderr[-2000:]}")
            return False
        ours = PagedRun(load(out), torch.float32, "torch").step({"a": ids})["a"]
        found = divergence(ours, load_file(said)["logits"])
        print(f"{library:14} {name:26} {found:.1e}", flush=True)
        return found < WIDER.get(name, LIMIT)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.round_trip", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--gptqmodel", metavar="PYTHON")
    parser.add_argument("--transformers", metavar="PYTHON")
    parser.add_argument("--only", default="", help="formats with this in their name")
    options = parser.parse_args()
    ids = Tokenizer.load(demo.model_path()).encode(demo.heldout_text()[:4000])[:256]
    fine = True
    for library, formats in (("gptqmodel", GPTQMODEL), ("transformers", TRANSFORMERS)):
        python = getattr(options, library)
        for name, flags in formats.items() if python else ():
            if options.only in name:
                fine &= check(library, python, name, flags, ids)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
