"""Runs other engines on the workloads of tests.benchmarks.gpu, each in a process of its own.

    python -m tests.benchmarks.gpu.peers NAME FOLDER JOB

``FOLDER`` contains a config.json; ``JOB`` is JSON: ``{"workloads": [[prompt, new, requests], ...],
"device": "cuda"}``. The last line of output is a JSON list of seconds. Weights are random.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.engine import Workload, play, random_prompts
from tests.benchmarks.gpu.sections import Call, Section

FULL_NAMES = {
    "transformers": "transformers, continuous batching (generate_batch), sdpa",
    "vllm": "vLLM (dummy weights, its defaults)",
}


def installed() -> list[str]:
    """Return the peers that are installed."""
    found = []
    for name in FULL_NAMES:
        with suppress(ImportError):
            found += [name] if find_spec(name) is not None else []
    return found


def run_peer(
    name: str, folder: Path, workloads: list[list[int]], device: str, timeout: float
) -> list[float]:
    """Return the seconds of each workload.

    Raises:
        RuntimeError: it failed; the message contains the end of its output.
    """
    job = json.dumps({"workloads": workloads, "device": device})
    command = [sys.executable, "-m", "tests.benchmarks.gpu.peers", name, str(folder), job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"not done within {timeout:.0f} s") from error
    if done.returncode:
        raise RuntimeError(" | ".join((done.stderr or done.stdout).splitlines()[-3:]))
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def transformers(folder: Path, workloads: list[list[int]], device: str) -> list[float]:
    """Run transformers' continuous batching with its own model code."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    times = []
    for prompt, new, requests in workloads:
        prompts = random_prompts(requests, prompt, config.vocab_size)
        # An end token of -1 is never generated.
        options = GenerationConfig(
            max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        model.generate_batch(prompts[:2], generation_config=options, max_new_tokens=4)
        began = time.perf_counter()
        results = model.generate_batch(prompts, generation_config=options, max_new_tokens=new)
        times.append(time.perf_counter() - began)
        count = sum(len(result.generated_tokens) for result in results.values())
        if count != requests * new:
            raise RuntimeError(f"{count} tokens instead of {requests * new}")
    return times


def vllm(folder: Path, workloads: list[list[int]], device: str) -> list[float]:
    """Run vLLM with its defaults, without a tokenizer and prefix caching."""
    from vllm import LLM, SamplingParams

    longest = max(prompt + new for prompt, new, _ in workloads)
    engine = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=longest,
        enable_prefix_caching=False,
        max_num_seqs=max(requests for _, _, requests in workloads),
    )
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    times = []
    for prompt, new, requests in workloads:
        options: Any = SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        prompts: Any = [
            {"prompt_token_ids": ids} for ids in random_prompts(requests, prompt, vocab)
        ]
        engine.generate(prompts[:2], options, use_tqdm=False)
        began = time.perf_counter()
        outputs = engine.generate(prompts, options, use_tqdm=False)
        times.append(time.perf_counter() - began)
        count = sum(len(output.outputs[0].token_ids) for output in outputs)
        if count != requests * new:
            raise RuntimeError(f"{count} tokens instead of {requests * new}")
    return times


def main() -> None:
    name, folder, job = sys.argv[1:]
    workload = json.loads(job)
    peer = {"transformers": transformers, "vllm": vllm}[name]
    seconds = peer(Path(folder), workload["workloads"], workload["device"])
    print(json.dumps(seconds), flush=True)


WORKLOADS = {
    True: [[1000, 1000, 256], [128, 2048, 256], [1000, 1000, 64]],
    False: [[10, 5, 4], [4, 8, 4]],
}
"""Prompt tokens, new tokens and requests, on a GPU (True) and on a CPU."""


def _ours(call: Call) -> list[dict[str, Any]]:
    longest = max(prompt + new for prompt, new, _ in WORKLOADS[call.large])
    limits: dict[str, Any] = {"max_total_tokens": longest + 8, "max_batch_size": 256}
    if not call.large:
        limits |= {"max_batch_prefill_tokens": 64, "max_batch_total_tokens": 1024}
        limits["max_batch_size"] = 4
    rows = []
    vocab = call.shape().config["vocab_size"]
    for prompt, new, requests in WORKLOADS[call.large]:
        prompts = random_prompts(requests, prompt, vocab)
        made = call.worker(**limits)
        play(*made, Workload(prompts[:2], 4))
        seconds = play(*made, Workload(prompts, new)).seconds
        rows.append(_row("ours", prompt, new, requests, seconds))
    call.free()
    return rows


def _row(name: str, prompt: int, new: int, requests: int, seconds: float) -> dict[str, Any]:
    return {
        "engine": name,
        "workload": f"{prompt}/{new}",
        "requests": requests,
        "seconds": seconds,
        "output tok/s": requests * new / seconds,
    }


def _others(call: Call) -> list[dict[str, Any]]:
    """Each in a process of its own, after the device's memory was freed."""
    call.free()
    call.shape()
    rows: list[dict[str, Any]] = []
    for name in reversed(installed()):  # vLLM first: it is what matters
        workloads = WORKLOADS[call.large]
        if name == "transformers":
            workloads = workloads[-1:]  # it is slow
        try:
            folder = call.folder / call.shape_name
            times = run_peer(name, folder, workloads, call.kind, max(1.0, call.left))
        except RuntimeError as error:
            rows.append({"engine": FULL_NAMES[name], "failed": str(error)})
            continue
        for (prompt, new, requests), seconds in zip(workloads, times, strict=True):
            rows.append(_row(FULL_NAMES[name], prompt, new, requests, seconds))
    return rows


SECTIONS = (
    Section("ours", _ours, 90, 240),
    Section("others", _others, 150, 480),
)


if __name__ == "__main__":
    main()
