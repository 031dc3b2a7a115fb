"""Latencies of requests under OpenTelemetry's names, for a collector; Prometheus has more.

Names, attributes and buckets are those of the conventions for servers of generative models, whose
status is "development":
https://github.com/open-telemetry/semantic-conventions-genai/blob/main/docs/gen-ai/gen-ai-metrics.md.
All requests that reach the engine are observed, whether their traces are sampled or not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tgi_cli.router.observability.access_log import AccessRecord
from tgi_cli.router.observability.gen_ai import PROVIDER
from tgi_cli.telemetry.meter import Meter

_DURATION_BOUNDS = tuple(0.01 * 2**i for i in range(14))
_FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0),
)
_TOKEN_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5),
)


class GenAIMetrics:
    """Histograms of a router's requests.

    Args:
        meter: creates and sends them.
        served: the model's name.
    """

    def __init__(self, meter: Meter, served: str) -> None:
        self._served = served
        self._duration = meter.seconds(
            "gen_ai.server.request.duration",
            "Time from the arrival of a request to the end of its answer.",
            _DURATION_BOUNDS,
        )
        self._first_token = meter.seconds(
            "gen_ai.server.time_to_first_token",
            "Time from the arrival of a request to its first token.",
            _FIRST_TOKEN_BOUNDS,
        )
        self._token = meter.seconds(
            "gen_ai.server.time_per_output_token",
            "Time per token of a sequence after its first one.",
            _TOKEN_BOUNDS,
        )

    def observe(self, record: AccessRecord, address: Mapping[str, Any]) -> None:
        """Count a request whose sequences have ended.

        Args:
            record: of the request; it has sequences.
            address: attributes of the address that it has arrived at.
        """
        generations = record.generations
        # Not as clients write it: there would be as many series as they think of names.
        model = generations[0].spec.adapter or self._served
        attributes = {
            "gen_ai.operation.name": record.operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            **address,
        }
        duration = time.perf_counter() - record.began
        if error := record.error_type:
            self._duration.record(duration, {**attributes, "error.type": error})
            return
        self._duration.record(duration, attributes)
        first = [each.timings.first_token for each in generations if each.timings.first_token]
        if first:
            self._first_token.record(min(first) - record.began, attributes)
        for generation in generations:
            if (later := generation.generated_tokens - 1) > 0:
                self._token.record(generation.timings.decode / later, attributes)
