"""What the router measures, under TGI's metric names.

TGI's counters carry no ``_total`` suffix, which prometheus_client cannot write, and its
histograms search their buckets one by one; so counters and histograms are our own few lines, in
the text format 0.0.4 (https://prometheus.io/docs/instrumenting/exposition_formats/). The metrics
of the process itself come from prometheus_client.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.exposition import generate_latest

from tgi_cli.engine.messages import EngineInfo
from tgi_cli.rpc.interface import EngineLoad

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

DURATION_BUCKETS = tuple(0.0001 * 1.5**power for power in range(1, 36))
"""Seconds: 0.00015 to 145.6, TGI's."""

FAILURES = (
    "validation",
    "overloaded",
    "generation",
    "timeout",
    "incomplete",
    "dropped",
    "template",
)


def linear_buckets(highest: int, steps: int = 100) -> tuple[float, ...]:
    """Equal steps up to ``highest``, TGI's for token counts."""
    return tuple(highest / steps * step for step in range(1, steps + 1))


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


class Counter:
    """A number that grows, by the values of at most one label."""

    def __init__(self, name: str, help: str, label: str = "", values: Sequence[str] = ()) -> None:
        self.name, self.help, self.label = name, help, label
        self.counts = dict.fromkeys(values or ("",), 0)

    def add(self, count: int = 1, value: str = "") -> None:
        """Count ``count`` more under a label's value."""
        self.counts[value] = self.counts.get(value, 0) + count

    def lines(self) -> Iterator[str]:
        """The exposition."""
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} counter"
        for value, count in self.counts.items():
            labels = f'{{{self.label}="{value}"}}' if self.label else ""
            yield f"{self.name}{labels} {count}"


class Histogram:
    """Counts per bucket, found by bisection (0.3 us an observation)."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name, self.help = name, help
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Record a value, ``times`` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def lines(self) -> Iterator[str]:
        """The exposition: cumulative buckets, sum and count."""
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} histogram"
        total = 0
        for bound, count in zip(self._bounds, self._counts, strict=False):
            total += count
            yield f'{self.name}_bucket{{le="{_number(bound)}"}} {total}'
        total += self._counts[-1]
        yield f'{self.name}_bucket{{le="+Inf"}} {total}'
        yield f"{self.name}_sum {_number(self._sum)}"
        yield f"{self.name}_count {total}"


class Metrics:
    """All metrics of one router.

    A request is one sequence: a prompt, or one of its samples. What is of the prompt (its length,
    its cached tokens) counts once for all of its samples.
    """

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        PlatformCollector(registry=self._process)
        seconds = DURATION_BUCKETS
        total_steps = linear_buckets(info.max_total_tokens)
        self.requests = Counter("tgi_request_count", "Sequences that were asked for.")
        self.successes = Counter("tgi_request_success", "Sequences that came to their end.")
        self.failures = Counter(
            "tgi_request_failure", "Sequences that failed, by cause.", "err", FAILURES
        )
        self.cached_tokens = Counter(
            "tgi_request_cached_tokens", "Prompt tokens found in the prefix cache."
        )
        self.duration = Histogram(
            "tgi_request_duration", "Seconds, arrival to last token.", seconds
        )
        self.validation_duration = Histogram(
            "tgi_request_validation_duration", "Seconds of validation and tokenization.", seconds
        )
        self.queue_duration = Histogram(
            "tgi_request_queue_duration", "Seconds before the first step.", seconds
        )
        self.inference_duration = Histogram(
            "tgi_request_inference_duration", "Seconds, first step to last token.", seconds
        )
        self.mean_token_duration = Histogram(
            "tgi_request_mean_time_per_token_duration", "Inference seconds per token.", seconds
        )
        self.first_token = Histogram(
            "tgi_request_time_to_first_token_duration", "Seconds, arrival to first token.", seconds
        )
        self.inter_token = Histogram(
            "tgi_request_inter_token_duration", "Seconds between tokens of a request.", seconds
        )
        self.input_length = Histogram(
            "tgi_request_input_length", "Prompt tokens.", linear_buckets(info.max_input_tokens)
        )
        self.generated_tokens = Histogram(
            "tgi_request_generated_tokens", "Generated tokens.", total_steps
        )
        self.max_new_tokens = Histogram(
            "tgi_request_max_new_tokens", "Most tokens that may be generated.", total_steps
        )
        self._exposed = tuple(
            metric for metric in vars(self).values() if isinstance(metric, Counter | Histogram)
        )

    def render(self, load: EngineLoad, in_flight: int, adapters: int = 0) -> bytes:
        """The whole exposition, with the engine as of its latest step."""
        lines = [line for metric in self._exposed for line in metric.lines()]
        lines.extend(self._engine_lines(load, in_flight, adapters))
        return "\n".join(lines).encode() + b"\n" + generate_latest(self._process)

    def _engine_lines(self, load: EngineLoad, in_flight: int, adapters: int) -> Iterator[str]:
        used = load.used_blocks * self._info.block_size
        capacity = self._info.max_batch_total_tokens
        gauges = (
            ("tgi_queue_size", "Requests that wait in the engine.", load.queued),
            ("tgi_batch_current_size", "Requests that run in the engine.", load.running),
            ("tgi_batch_current_max_tokens", "Tokens that the KV blocks in use can hold.", used),
            ("tgi_batch_max_total_tokens", "Tokens that the KV cache can hold.", capacity),
            ("tgi_kv_cache_usage", "KV blocks in use, 0 to 1.", used / capacity if capacity else 0),
            (
                "tgi_prefix_cache_blocks",
                "KV blocks whose content can be used again.",
                load.cached_blocks,
            ),
            ("tgi_request_in_flight", "Sequences that hold a place in the router.", in_flight),
            ("tgi_lora_adapters", "LoRA adapters that requests may name.", adapters),
        )
        for name, help, value in gauges:
            yield f"# HELP {name} {help}"
            yield f"# TYPE {name} gauge"
            yield f"{name} {_number(value)}"
        counts = (
            ("tgi_preemption_count", "Sequences set back to make room.", load.preemptions),
            ("tgi_engine_step_count", "Steps of the engine.", load.steps),
            ("tgi_engine_prompt_tokens", "Prompt tokens computed.", load.context_tokens),
            (
                "tgi_prefix_cache_query_tokens",
                "Prompt tokens looked up in the prefix cache.",
                load.prompt_tokens,
            ),
            (
                "tgi_prefix_cache_hit_tokens",
                "Prompt tokens found in the prefix cache.",
                load.reused_tokens,
            ),
        )
        for name, help, count in counts:
            counter = Counter(name, help)
            counter.add(count)
            yield from counter.lines()
