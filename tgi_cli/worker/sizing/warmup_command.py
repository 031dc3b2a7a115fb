"""`tgi warmup` of a model: load it, run its worst steps, keep what they took, time the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tgi_cli.config import ServeConfig
from tgi_cli.device import describe
from tgi_cli.worker.sizing import saved_profile
from tgi_cli.worker.sizing.step_timing import StepTimer, read_rate
from tgi_cli.worker.worker import load_worker

log = logging.getLogger(__name__)


def measure(
    serve: ServeConfig,
    model_path: Path,
    batch_sizes: Sequence[int] | None = None,
    say: Callable[[str], object] = lambda words: None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """What a server of this model would find out at its start, and how long its steps take.

    Args:
        serve: the user's words, as for a server.
        model_path: folder of the checkpoint.
        batch_sizes: numbers of sequences to time decodes of; None: powers of two.
        say: told what is being done.
        progress: told of the loading; see :func:`tgi_cli.models.load_model`.

    Returns:
        Values that JSON has; sizes in bytes, times in seconds. ``left_out``
        says what took too long to be timed, ``kept`` is the file that later starts find (None: it
        could not be written).

    Raises:
        TgiError: as :func:`tgi_cli.worker.worker.load_worker` and ``warmup``.
    """
    say("loading the model")
    worker, config = load_worker(replace(serve, measured_limits=False), model_path, progress)
    try:
        say("running the worst steps")
        capacity = worker.warmup()
        info = worker.info()
        kept: Path | None = None
        try:
            kept = saved_profile.keep(config, capacity)
        except OSError as error:
            log.warning("what was measured cannot be kept: %s", error)
        stopwatch = StepTimer(worker, capacity)
        prefills, decodes = [], []
        for prefill in stopwatch.prefills():
            prefills.append(
                {
                    "tokens": prefill.tokens,
                    "seconds": prefill.seconds,
                    "tokens_per_second": prefill.tokens_per_second,
                }
            )
            say(f"timing prompts: {prefill.tokens} tokens")
        say("measuring the memory")
        device = torch.device(config.device)
        # Each of several GPUs reads its own memory.
        rate = read_rate(device) * (config.num_shard if config.device == "cuda" else 1)
        per_token = capacity.cache_bytes / max(1, capacity.max_batch_total_tokens)
        for decode in stopwatch.decodes(batch_sizes):
            rows = decode.batch_size
            read = worker.read_bytes(rows) + per_token * decode.context * rows
            decodes.append(
                {
                    "batch_size": rows,
                    "context": decode.context,
                    "seconds": decode.seconds,
                    "tokens_per_second": decode.tokens_per_second,
                    "bytes_read": int(read),
                    "memory_share": read / decode.seconds / rate,
                }
            )
            say(f"timing decodes: {rows} sequences")
    finally:
        worker.close()
    return {
        "model": info.model_id,
        "device": info.device,
        "device_name": describe(config.device).name,
        "dtype": info.dtype,
        "quantize": info.quantize,
        "num_shard": info.num_shard,
        "weight_bytes": capacity.weight_bytes,
        "kv_blocks": capacity.num_blocks,
        "block_size": info.block_size,
        "kv_bytes": capacity.cache_bytes,
        "activation_bytes": capacity.activation_bytes,
        "max_batch_total_tokens": info.max_batch_total_tokens,
        "max_total_tokens": info.max_total_tokens,
        "max_input_tokens": info.max_input_tokens,
        "max_batch_prefill_tokens": info.max_batch_prefill_tokens,
        "max_batch_size": info.max_batch_size,
        "cuda_graphs": capacity.graphs,
        "load_seconds": capacity.load_seconds,
        "warmup_seconds": capacity.warmup_seconds,
        "memory_bytes_per_second": rate,
        "prefill": prefills,
        "decode": decodes,
        "left_out": stopwatch.left_out,
        "kept": None if kept is None else str(kept),
    }
