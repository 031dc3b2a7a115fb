"""Hints for users of vLLM, llama.cpp and Ollama: what replaces their flags and commands.

click suggests flags by their spelling, which misleads: ``--ctx-size`` resembles
``--max-batch-size``. docs/from-others.md is the whole translation; a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

_FLAG = re.compile(r"--[a-z][a-z-]*")

_REPLACED: Mapping[str, Mapping[str, str]] = {
    "vLLM": {
        "--host": "--hostname",
        "--max-model-len": "--max-total-tokens",
        "--max-num-seqs": "--max-batch-size",
        "--max-num-batched-tokens": "--max-batch-prefill-tokens",
        "--gpu-memory-utilization": "--cuda-memory-fraction",
        "--tensor-parallel-size": "--num-shard",
        "--data-parallel-size": "--replicas",
        "--no-enable-prefix-caching": "--no-prefix-caching",
        "--enforce-eager": "--cuda-graphs 0",
        "--quantization": "--quantize, if weights are to be quantized on load,",
        "--enable-lora": "--lora-adapters NAME=PATH",
        "--lora-modules": "--lora-adapters NAME=PATH",
        "--limit-mm-per-prompt": "--max-images",
        "--disable-log-requests": "--logger-level warn",
    },
    "llama.cpp": {
        "-m": "the argument FILE, as in `tgi serve FILE`,",
        "--model": "the argument MODEL, as in `tgi serve MODEL`,",
        "--hf-repo": "the argument ORG/REPO:TAG, as in `tgi serve ORG/REPO:Q4_K_M`,",
        "-c": "--max-total-tokens",
        "--ctx-size": "--max-total-tokens",
        "--parallel": "--max-batch-size",
        "--threads": "the variable OMP_NUM_THREADS",
        "-b": "--max-batch-prefill-tokens",
        "--batch-size": "--max-batch-prefill-tokens",
        "--ubatch-size": "--max-batch-prefill-tokens",
        "--cache-type-k": "--kv-cache-dtype",
        "--cache-type-v": "--kv-cache-dtype",
        "--alias": "--served-model-name",
        "--chat-template-file": "--chat-template",
        "--lora": "--lora-adapters",
        "--model-draft": "--speculative-model",
        "--draft-max": "--speculate",
        "--models-preset": "--models",
        "--reasoning-format": "--reasoning-parser",
        "--reasoning-budget": "`thinking_budget_tokens` in requests",
        "--grammar": "`grammar` in requests",
        "--json-schema": "`json_schema` in requests",
    },
    "SGLang": {"--dist-init-addr": "--master-addr and --master-port"},
}
"""What to use instead of a flag, by server."""

_NEEDLESS: Mapping[str, Mapping[str, str]] = {
    "vLLM": {
        "--enable-prefix-caching": "prefixes are cached by default",
        "--enable-auto-tool-choice": "the format of tool calls is detected",
        "--device": "GPUs are used where torch finds any; CUDA_VISIBLE_DEVICES= hides them",
        "--swap-space": "preempted sequences are recomputed",
    },
    "llama.cpp": {
        "--n-gpu-layers": "a model is on one kind of device",
        "--gpu-layers": "a model is on one kind of device",
        "--flash-attn": "the fastest attention is the default",
        "--jinja": "chat templates always run",
        "--metrics": "metrics are always at /metrics",
        "--mmproj": "GGUF files are served as models of text",
    },
}
"""Why a flag is not needed, or has no counterpart, by server."""

_COMMANDS: Mapping[str, str] = {
    "run": "`tgi chat MODEL` chats with a model, `tgi serve MODEL` serves it",
    "pull": "`tgi download-weights MODEL` downloads a model",
    "list": "`hf cache ls` lists the downloaded models",
    "ls": "`hf cache ls` lists the downloaded models",
    "rm": "`hf cache rm` removes a downloaded model",
    "ps": "GET /v1/models lists the models of a server",
    "show": "`tgi quantize --inspect MODEL` describes a checkpoint",
    "launch": "`tgi connect CLIENT` prints the settings of a client",
    "start": "`tgi serve` starts a server",
}
"""Commands of Ollama, and what to run instead."""


def flag_hint(flag: str, known: Collection[str]) -> str:
    """What replaces a flag of another server on a command that has the flags ``known``.

    An empty string if the flag is of none, or what replaces it is of another command.
    """
    for server, flags in _REPLACED.items():
        instead = flags.get(flag, "")
        if instead and set(_FLAG.findall(instead)) <= set(known):
            return f"use {instead} instead of {server}'s {flag}"
    for server, flags in _NEEDLESS.items():
        if flag in flags:
            return f"leave out {server}'s {flag}: {flags[flag]}"
    return ""


def command_hint(word: str) -> str:
    """What to run instead of an unknown command, or an empty string if that is not known."""
    if word in _COMMANDS:
        return _COMMANDS[word]
    if "/" in word or word.endswith(".gguf") or Path(word).is_dir():
        return f"to serve a model: `tgi serve {word}`"
    return ""
