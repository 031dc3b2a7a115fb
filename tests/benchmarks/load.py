"""Measure time and memory to the first logits: ``python -m tests.benchmarks.load CHECKPOINT``.

With ``--streamed``, compares the folder with a store of S3's interface that this process serves it
from, and ``--load-format stream``; the store's memory and time are not counted.

Compares our loader with transformers' ``from_pretrained`` (which memory-maps weights and reads them
on first use), in turns. Each round is a process that loads a model and runs one token. Peak memory
is the process's (VmHWM: anonymous and mapped file pages) less what its imports take. Files are in
the page cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.tools.store_server import StoreServer
from tgi_cli.hub.resolve import resolve_model

_OURS = """
from tgi_cli.models import load_model, read_config
from tgi_cli.models import decoder
from tgi_cli.attention import create_attention
from tests.tools.paged_run import make_metadata
def load(path, dtype, load_format):
    model = load_model(read_config(path), dtype, torch.device("cpu"), load_format=load_format)
    attention = create_attention(None, model.kv_specs, 16, dtype, torch.device("cpu"))
    attention.allocate(1)
    with torch.inference_mode():
        attention.plan(make_metadata([[0]], [1], [1], 16))
        model.logits(model(torch.tensor([1]), torch.tensor([0]), attention))
    return model
"""

_THEIRS = """
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
def load(path, dtype, load_format):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    with torch.inference_mode():
        model(torch.tensor([[1]]))
    return model
"""

_CHILD = """
import json, sys, time
from pathlib import Path
import torch
{}
def status(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
torch.zeros(1)
before, began = status("VmRSS"), time.perf_counter()
model = load(Path(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3])
seconds = time.perf_counter() - began
print(json.dumps({{"seconds": seconds, "before": before, "peak": status("VmHWM"),
                  "after": status("VmRSS")}}))
"""


def measure(code: str, path: Path, dtype: str, load_format: str) -> dict[str, float]:
    """Run one round; return seconds, and bytes before, at the peak and after."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD.format(code), str(path), dtype, load_format],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


@contextlib.contextmanager
def streamed(checkpoint: Path) -> Iterator[Path]:
    """The folder through which a checkpoint is read from a store."""
    with tempfile.TemporaryDirectory() as cache, StoreServer() as store:
        files = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.is_file()}
        store.put_folder("models", "m", files)
        os.environ.update(
            AWS_ENDPOINT_URL=store.url,
            AWS_ACCESS_KEY_ID="AKIATEST",
            AWS_SECRET_ACCESS_KEY="c2VjcmV0",
            HF_HUB_CACHE=f"{cache}/hub",
        )
        yield resolve_model("s3://models/m", stream=True).path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streamed", action="store_true")
    arguments = parser.parse_args()
    checkpoint: Path = arguments.checkpoint
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    sides = {"tgi": (_OURS, checkpoint)}
    with contextlib.ExitStack() as stack:
        if arguments.streamed:
            sides["tgi, streamed"] = (_OURS, stack.enter_context(streamed(checkpoint)))
        elif arguments.load_format == "auto":
            sides["transformers"] = (_THEIRS, checkpoint)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for _ in range(arguments.rounds):
            for name, (code, path) in sides.items():
                rounds[name].append(measure(code, path, arguments.dtype, arguments.load_format))
    print(f"{size / 1e6:.0f} MB of weights on disk; medians of {arguments.rounds}\n")
    print("| | seconds | imports MB | peak beyond MB | of the weights | after MB |")
    print("|---|---|---|---|---|---|")
    for name, results in rounds.items():
        middle = {key: statistics.median(each[key] for each in results) for key in results[0]}
        peak, after = (middle[key] - middle["before"] for key in ("peak", "after"))
        share = f"{peak / size:.2f}" if size else "-"
        print(
            f"| {name} | {middle['seconds']:.1f} | {middle['before'] / 1e6:.0f} "
            f"| {peak / 1e6:.0f} | {share} | {after / 1e6:.0f} |"
        )


if __name__ == "__main__":
    main()
