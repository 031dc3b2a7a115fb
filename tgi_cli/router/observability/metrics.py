"""What the router measures, under TGI's metric names, each once for each sequence.

The metrics of the process itself come from prometheus_client.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.exposition import generate_latest

from tgi_cli.engine.messages import EngineInfo
from tgi_cli.engine.metrics import SECONDS
from tgi_cli.router.observability.engine_metrics import EngineView, engine_lines
from tgi_cli.router.observability.prometheus import (
    CounterMetric,
    HistogramMetric,
    gauge,
    linear_buckets,
)

FAILURES = (
    "validation",
    "overloaded",
    "generation",
    "timeout",
    "incomplete",
    "dropped",
    "template",
)


class Metrics:
    """All metrics of one router.

    A request is one sequence: a prompt, or one of its samples. What is of the prompt (its length,
    its cached tokens) counts once for all of its samples.
    """

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        """Of the engine that is there. Buckets stay those of the first: a series may not change."""
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        PlatformCollector(registry=self._process)
        seconds = SECONDS
        total_steps = linear_buckets(info.max_total_tokens)
        self.requests = CounterMetric("tgi_request_count", "Sequences that were asked for.")
        self.successes = CounterMetric("tgi_request_success", "Sequences that came to their end.")
        self.failures = CounterMetric(
            "tgi_request_failure", "Sequences that failed, by cause.", "err", FAILURES
        )
        self.cached_tokens = CounterMetric(
            "tgi_request_cached_tokens", "Prompt tokens found in the prefix cache."
        )
        self.duration = HistogramMetric(
            "tgi_request_duration", "Seconds, arrival to last token.", seconds
        )
        self.validation_duration = HistogramMetric(
            "tgi_request_validation_duration", "Seconds of validation and tokenization.", seconds
        )
        self.queue_duration = HistogramMetric(
            "tgi_request_queue_duration", "Seconds before the first step.", seconds
        )
        self.inference_duration = HistogramMetric(
            "tgi_request_inference_duration", "Seconds, first step to last token.", seconds
        )
        self.mean_token_duration = HistogramMetric(
            "tgi_request_mean_time_per_token_duration", "Inference seconds per token.", seconds
        )
        self.first_token = HistogramMetric(
            "tgi_request_time_to_first_token_duration", "Seconds, arrival to first token.", seconds
        )
        self.inter_token = HistogramMetric(
            "tgi_request_inter_token_duration", "Seconds between tokens of a request.", seconds
        )
        self.input_length = HistogramMetric(
            "tgi_request_input_length", "Prompt tokens.", linear_buckets(info.max_input_tokens)
        )
        self.generated_tokens = HistogramMetric(
            "tgi_request_generated_tokens", "Generated tokens.", total_steps
        )
        self.max_new_tokens = HistogramMetric(
            "tgi_request_max_new_tokens", "Most tokens that may be generated.", total_steps
        )
        self._exposed = tuple(
            metric
            for metric in vars(self).values()
            if isinstance(metric, CounterMetric | HistogramMetric)
        )

    def render(self, view: EngineView, in_flight: int) -> bytes:
        """The whole exposition, with the engine as it was seen last."""
        lines = [line for metric in self._exposed for line in metric.lines()]
        lines += gauge(
            "tgi_request_in_flight", "Sequences that hold a place in the router.", in_flight
        )
        lines += engine_lines(self.info, view)
        return "\n".join(lines).encode() + b"\n" + generate_latest(self._process)
