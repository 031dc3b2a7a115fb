"""Closed batches, measured as TGI's benchmark measures them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tgi_cli.bench.events import BatchRecord
from tgi_cli.bench.statistics.observations import MS


def batch_values(batches: Iterable[BatchRecord]) -> dict[str, NDArray[np.float64]]:
    """A value for each run that counts, by metric (``BATCH_METRICS``); ms and tokens/s.

    A decode length of 1 has no decode calls, so no values of decoding. Definitions:
    github.com/huggingface/text-generation-inference, benchmark/src/generation.rs.
    """
    runs = [batch for batch in batches if not batch.warmup]
    prefill = np.array([run.prefill for run in runs])
    tokens = np.array([run.batch_size * run.sequence_length for run in runs])
    decoding = [run for run in runs if run.decodes]
    total = np.array([sum(run.decodes) for run in decoding])
    calls = np.array([len(run.decodes) for run in decoding])
    sizes = np.array([run.batch_size for run in decoding])
    return {
        "prefill": prefill * MS,
        "decode_token": total / calls * MS,
        "decode_total": total * MS,
        "prefill_throughput": _per_second(tokens, prefill),
        "decode_throughput": _per_second(sizes * calls, total),
    }


def _per_second(amount: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Their ratio; a clock too coarse to see a call pass counts as its nanosecond."""
    return amount / np.maximum(seconds, 1e-9)
