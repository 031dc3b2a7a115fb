"""Correctness on a device: compares miniature models with the same on the CPU in float32."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.gpu_engine import Played, make, play, random_prompts
from tests.parity.cases import CASES
from tests.tools.checkpoints import make_llama

SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
LENGTHS = (1, 15, 16, 17, 40, 100, 131, 200, 7, 64, 33)
"""Prompt lengths: block boundaries, several prefill chunks, a batch that CUDA graphs pad."""
NEW_TOKENS = 24
LIMITS: dict[str, Any] = {
    "max_total_tokens": 512,
    "max_batch_prefill_tokens": 96,
    "max_batch_size": 16,
    "max_batch_total_tokens": 16 * 512,
    "load_format": "auto",
}

TOLERANCES = {"float32": 0.01, "bfloat16": 1.0}
"""Largest difference of log-probabilities from the CPU's in float32, for equal tokens and for the
first token of a text that differs, which must be nearly as likely."""

TESTS = ("tests/unit/attention", "tests/unit/layers", "tests/unit/worker")
"""Folders with tests of device code, in files named after the device or kernel language."""


def _llama(folder: Path) -> Path:
    return make_llama(folder / "miniature", seed=3, **SHAPE)


def _recurrent(folder: Path) -> Path:
    from tests.parity.families import (
        make_checkpoint,
    )  # needs transformers, which GPUs' hosts may lack

    case = CASES["Qwen 3.5"]
    values = dict(case.values) | {"max_position_embeddings": SHAPE["max_position_embeddings"]}
    return make_checkpoint(replace(case, values=values), folder / "recurrent", seed=3)


MINIATURES: dict[str, tuple[int, Callable[[Path], Path]]] = {
    "attention": (SHAPE["vocab_size"], _llama),
    "recurrent states": (256, _recurrent),
}
"""Sizes of vocabularies, and what writes a checkpoint."""


def parity(folder: Path, kind: str) -> dict[str, Any]:
    """Generate greedy tokens on the device: with and without graphs and overlapping steps.

    Raises:
        AssertionError: they differ from the CPU's by more than the tolerance.
    """
    found: dict[str, Any] = {}
    wrong: list[str] = []
    for name, (vocab_size, make_miniature) in MINIATURES.items():
        found[name] = _compared(make_miniature(folder), vocab_size, kind, wrong)
    assert not wrong, "; ".join(wrong)
    return found


def _compared(checkpoint: Path, vocab_size: int, kind: str, wrong: list[str]) -> dict[str, Any]:
    """How one miniature does; adds to ``wrong``."""
    prompts = [
        random_prompts(1, length, vocab_size, seed)[0] for seed, length in enumerate(LENGTHS)
    ]
    torch.backends.cuda.matmul.allow_tf32 = False
    reference = make(checkpoint, "cpu", dtype="float32", **LIMITS)
    expected = play(*reference, prompts, NEW_TOKENS, depth=0)
    found: dict[str, Any] = {"tokens": expected.count}
    for dtype in ("float32", "bfloat16"):
        for graphs in (False, True):
            worker, limits = make(checkpoint, kind, dtype=dtype, graphs=graphs, **LIMITS)
            if graphs and kind == "cuda" and worker.runner.graphs is None:
                wrong.append(f"{dtype}: graphs could not be captured")
            for depth in (0, 1):
                same, difference = _compare(
                    expected, play(worker, limits, prompts, NEW_TOKENS, depth)
                )
                how = f"{dtype}, {'graphs' if graphs else 'eager'}, depth {depth}"
                found[how] = f"{same} equal tokens, logprobs within {difference:.2g}"
                if not difference <= TOLERANCES[dtype]:
                    wrong.append(f"{how}: {found[how]}")
            del worker
    return found


def _compare(expected: Played, got: Played) -> tuple[int, float]:
    """Count the tokens before each first difference; also return the largest logprob difference."""
    same, largest = 0, 0.0
    for request, tokens in expected.tokens.items():
        for index, token in enumerate(tokens):
            difference = got.logprobs[request][index] - expected.logprobs[request][index]
            largest = max(largest, abs(difference))
            if got.tokens[request][index] != token:
                break
            same += 1
    return same, largest


def device_tests(timeout: float) -> dict[str, Any]:
    """Run the unit tests of device code.

    Raises:
        AssertionError: some failed; the message contains pytest's summary.
    """
    if importlib.util.find_spec("pytest") is None:
        return {"pytest": "not installed"}
    files = [
        str(path)
        for folder in TESTS
        for path in sorted(Path(folder).glob("test_*.py"))
        if any(word in path.name for word in ("cuda", "triton", "flashinfer"))
    ]
    # Ignore the project's pytest options, which need plugins that may not be installed.
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", ".", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    summary = done.stdout.splitlines()[-1] if done.stdout else done.stderr[-300:]
    assert done.returncode == 0, "\n".join(done.stdout.splitlines()[-40:]) or summary
    return {"pytest": summary}
