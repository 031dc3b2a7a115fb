"""Is what the device computes right? A miniature model against the same on the host, in float32."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.gpu_engine import Played, make, play, random_prompts
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
"""Of the prompts: block boundaries, chunks of a prefill, a batch that graphs pad."""
NEW = 24
SAID: dict[str, Any] = {
    "max_total_tokens": 512,
    "max_batch_prefill_tokens": 96,
    "max_batch_size": 16,
    "max_batch_total_tokens": 16 * 512,
    "load_format": "auto",
}

MAX_APART = {"float32": 0.01, "bfloat16": 1.0}
"""How far log-probabilities may be from the host's in float32: of tokens that are the same, and of
two that differ first in a text, which are as good as equally likely then."""

TESTS = ("tests/unit/attention", "tests/unit/layers", "tests/unit/worker")
"""Where tests of a device's code are: in files whose names say so."""


def parity(folder: Path, kind: str) -> dict[str, Any]:
    """Greedy tokens on the device, by launches and by graphs, step by step and overlapped.

    Raises:
        AssertionError: they are not the host's, by more than what is as good as a tie.
    """
    checkpoint = make_llama(folder / "miniature", seed=3, **SHAPE)
    prompts = [
        random_prompts(1, length, SHAPE["vocab_size"], seed)[0]
        for seed, length in enumerate(LENGTHS)
    ]
    torch.backends.cuda.matmul.allow_tf32 = False
    reference = make(checkpoint, "cpu", dtype="float32", **SAID)
    expected = play(*reference, prompts, NEW, depth=0)
    found: dict[str, Any] = {"tokens": expected.count}
    wrong = []
    for dtype in ("float32", "bfloat16"):
        for graphs in (False, True):
            worker, limits = make(checkpoint, kind, dtype=dtype, graphs=graphs, **SAID)
            if graphs and kind == "cuda" and worker.runner.graphs is None:
                wrong.append(f"{dtype}: graphs could not be captured")
            for depth in (0, 1):
                same, apart = _compare(expected, play(worker, limits, prompts, NEW, depth))
                how = f"{dtype}, {'graphs' if graphs else 'launched'}, depth {depth}"
                found[how] = f"{same} tokens are the same, logprobs {apart:.2g} apart"
                if not apart <= MAX_APART[dtype]:
                    wrong.append(f"{how}: {found[how]}")
            del worker
    assert not wrong, "; ".join(wrong)
    return found


def _compare(expected: Played, got: Played) -> tuple[int, float]:
    """Tokens that are the same up to each text's first that is not; how far logprobs are apart."""
    same, apart = 0, 0.0
    for request, tokens in expected.tokens.items():
        for index, token in enumerate(tokens):
            difference = got.logprobs[request][index] - expected.logprobs[request][index]
            apart = max(apart, abs(difference))
            if got.tokens[request][index] != token:
                break
            same += 1
    return same, apart


def device_tests(timeout: float) -> dict[str, Any]:
    """The unit tests that want a GPU.

    Raises:
        AssertionError: some failed; the message has pytest's summary.
    """
    if importlib.util.find_spec("pytest") is None:
        return {"pytest": "not installed"}
    files = [
        str(path)
        for folder in TESTS
        for path in sorted(Path(folder).glob("test_*.py"))
        if any(word in path.name for word in ("cuda", "triton", "flashinfer"))
    ]
    # Without the project's options, which name plugins that may not be here.
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", ".", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    summary = done.stdout.splitlines()[-1] if done.stdout else done.stderr[-300:]
    assert done.returncode == 0, "\n".join(done.stdout.splitlines()[-40:]) or summary
    return {"pytest": summary}
