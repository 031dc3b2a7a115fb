"""The router's metrics, one observation for each sequence, under TGI's names where TGI has them.

The metrics of the process itself come from prometheus_client.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.exposition import generate_latest

from tgi_cli.engine.messages import EngineInfo
from tgi_cli.engine.metrics import SECONDS
from tgi_cli.router.observability.openmetrics import exposition_of, openmetrics
from tgi_cli.router.observability.prometheus import (
    CounterMetric,
    HistogramMetric,
    gauge,
    linear_buckets,
)

FAILURES = (
    "validation", "overloaded", "generation", "timeout", "incomplete", "dropped", "template",
)  # fmt: skip


class Metrics:
    """All metrics of one router.

    A request is one sequence: a prompt, or one of its samples. The prompt's length and its cached
    tokens count once for all of its samples. Buckets of tokens are those of the first engine's
    limits, as those of a series must not change.
    """

    def __init__(self, info: EngineInfo) -> None:
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        PlatformCollector(registry=self._process)
        seconds = partial(HistogramMetric, bounds=SECONDS)
        tokens = partial(HistogramMetric, bounds=linear_buckets(info.max_total_tokens))
        inputs = linear_buckets(info.max_input_tokens)
        self.requests = CounterMetric("tgi_request_count", "Sequences requested.")
        self.successes = CounterMetric("tgi_request_success", "Sequences completed.")
        self.failures = CounterMetric(
            "tgi_request_failure", "Sequences failed, by cause.", "err", FAILURES
        )
        self.cached_tokens = CounterMetric(
            "tgi_request_cached_tokens_total", "Prompt tokens found in the prefix cache."
        )
        self.duration = seconds("tgi_request_duration", "Seconds from arrival to last token.")
        self.validation_duration = seconds(
            "tgi_request_validation_duration", "Seconds of validation and tokenization."
        )
        self.queue_duration = seconds(
            "tgi_request_queue_duration", "Seconds in the queue, before the first step."
        )
        self.inference_duration = seconds(
            "tgi_request_inference_duration", "Seconds from first step to last token."
        )
        self.mean_token_duration = seconds(
            "tgi_request_mean_time_per_token_duration", "Inference seconds per token."
        )
        self.first_token = seconds(
            "tgi_request_time_to_first_token_seconds", "Time from arrival to first token."
        )
        self.inter_token = seconds(
            "tgi_request_inter_token_seconds", "Time between tokens of a request."
        )
        self.input_length = HistogramMetric("tgi_request_input_length", "Prompt tokens.", inputs)
        self.generated_tokens = tokens("tgi_request_generated_tokens", "Generated tokens.")
        self.max_new_tokens = tokens("tgi_request_max_new_tokens", "Limit of generated tokens.")
        self._exposed = tuple(
            metric
            for metric in vars(self).values()
            if isinstance(metric, CounterMetric | HistogramMetric)
        )

    def render(self, in_flight: int, engine: Iterable[str], exemplars: bool = False) -> bytes:
        """The whole exposition, with the lines of the engine's metrics.

        With exemplars, it is OpenMetrics instead of the text format.
        """
        lines: list[str] = []
        for metric in self._exposed:
            if isinstance(metric, HistogramMetric):
                lines += metric.lines(exemplars)
            else:
                lines += metric.lines()
        lines += gauge("tgi_request_in_flight", "Sequences in flight in the router.", in_flight)
        lines += engine
        if exemplars:
            text = "\n".join([*openmetrics(lines), ""])
            return text.encode() + exposition_of(self._process)
        return "\n".join([*lines, ""]).encode() + generate_latest(self._process)
