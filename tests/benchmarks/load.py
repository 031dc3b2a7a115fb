"""Time and memory to load a checkpoint: ``python -m tests.benchmarks.load CHECKPOINT``.

Each round is a process of its own that loads the model and nothing else. Peaks are the process's
(VmHWM: anonymous pages and the mapped pages of files), over what ``import torch`` and our modules
take; the time is with the files in the page cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

_CHILD = """
import json, sys, time
from pathlib import Path
import torch
from tgi_cli.models import load_model, read_config
def status(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
config = read_config(Path(sys.argv[1]))
torch.zeros(1)
before, began = status("VmRSS"), time.perf_counter()
dtype, load_format = getattr(torch, sys.argv[2]), sys.argv[3]
model = load_model(config, dtype, torch.device("cpu"), load_format=load_format)
seconds = time.perf_counter() - began
print(json.dumps({"seconds": seconds, "before": before, "peak": status("VmHWM"),
                  "after": status("VmRSS"), "weights": model.weight_bytes}))
"""


def measure(path: Path, dtype: str, load_format: str) -> dict[str, float]:
    """One round: seconds, and bytes before, at the peak and after."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(path), dtype, load_format],
        check=True,
        capture_output=True,
        text=True,
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    on_disk = sum(file.stat().st_size for file in arguments.checkpoint.glob("*.safetensors"))
    rounds = [
        measure(arguments.checkpoint, arguments.dtype, arguments.load_format)
        for _ in range(arguments.rounds)
    ]
    middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    size = on_disk or middle["weights"]
    print(f"on disk            {on_disk / 1e6:8.0f} MB")
    print(f"weights as kept    {middle['weights'] / 1e6:8.0f} MB")
    print(
        f"seconds            {middle['seconds']:8.2f}   ({size / middle['seconds'] / 1e9:.2f} GB/s)"
    )
    print(f"before             {middle['before'] / 1e6:8.0f} MB")
    for name in ("peak", "after"):
        taken = middle[name] - middle["before"]
        print(f"{name:19}{taken / 1e6:8.0f} MB over that, {taken / size:.2f} times the weights")


if __name__ == "__main__":
    main()
