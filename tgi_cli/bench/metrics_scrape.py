"""Scrapes a server's /metrics before, during and after a step, by TGI's names.

vLLM's (https://docs.vllm.ai/en/latest/usage/metrics/) and SGLang's
(https://docs.sglang.ai/references/production_metrics.html) names are
translated where they mean the same.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tgi_cli.bench.settings import RequestSettings

_SECONDS = 1.0
_TIMEOUT = 2.0

_ALIASES = {
    "tgi_queue_size": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "tgi_batch_current_size": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "tgi_kv_cache_usage_ratio": (
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "sglang:token_usage",
    ),
    "tgi_prefix_cache_query_tokens_total": ("vllm:prefix_cache_queries_total",),
    "tgi_prefix_cache_hit_tokens_total": ("vllm:prefix_cache_hits_total",),
    "tgi_preemptions_total": ("vllm:num_preemptions_total",),
    "tgi_draft_tokens_total": ("vllm:spec_decode_num_draft_tokens_total",),
    "tgi_draft_accepted_tokens_total": ("vllm:spec_decode_num_accepted_tokens_total",),
    "tgi_engine_prompt_tokens_total": ("vllm:prompt_tokens_total",),
    "tgi_request_generated_tokens_sum": ("vllm:generation_tokens_total",),
}
"""The names of other servers for TGI's metrics."""


@dataclass(frozen=True)
class MetricsReading:
    """The metrics of an exposition, summed over labels, and which of them are gauges.

    Those with a ``source``, as drafts have, are apart: ``NAME{source=SOURCE}``.
    """

    values: dict[str, float]
    gauges: frozenset[str]


def parse_metrics(text: str) -> MetricsReading:
    """Read the samples of an exposition by TGI's names, without buckets of histograms.

    Raises:
        ValueError: The text is not in Prometheus' format.
    """
    sums: dict[str, float] = defaultdict(float)
    gauges = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name
            if family.type == "counter" and name not in text:
                name = name.removesuffix("_total")  # which the parser appends to TGI's counters
            if not name.endswith(("_bucket", "_info", "_created")):
                source = sample.labels.get("source")
                name = f"{name}{{source={source}}}" if source else name
                sums[name] += sample.value
                if family.type == "gauge":
                    gauges.add(name)
    values = {name: value for name, value in sums.items() if name.startswith("tgi_")}
    for name, aliases in _ALIASES.items():
        alias = next((alias for alias in aliases if alias in sums), None)
        if name not in values and alias is not None:
            values[name] = sums[alias]
            if alias in gauges:
                gauges.add(name)
    return MetricsReading(values, frozenset(gauges & values.keys()))


_NOTHING = MetricsReading({}, frozenset())


class MetricsScraper:
    """Reads /metrics once per second.

    Args:
        url: URL of the server; empty to read nothing.
    """

    def __init__(self, url: str, settings: RequestSettings) -> None:
        self._url = f"{url.removesuffix('/').removesuffix('/v1')}/metrics" if url else ""
        self._settings = settings
        self._first = self._last = _NOTHING
        self._levels: dict[str, list[float]] = defaultdict(list)
        self._client: httpx.AsyncClient | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start with the step."""
        if not self._url:
            return
        self._client = httpx.AsyncClient(**client_options(self._settings, _TIMEOUT))
        if await self._read():
            self._first = self._last
            self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Stop with the step."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._read()
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def metrics(self) -> dict[str, float]:
        """The increase of each counter over the step; mean and maximum (``NAME_max``) of gauges.

        ``NAME_sum`` and ``NAME_count`` of a histogram are counters too.
        """
        first, last = self._first.values, self._last
        found = {
            name: value - first.get(name, 0.0)
            for name, value in last.values.items()
            if name not in last.gauges and value >= first.get(name, 0.0)
        }
        for name, values in self._levels.items():
            found[name] = sum(values) / len(values)
            found[f"{name}_max"] = max(values)
        return found

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_SECONDS)
            if await self._read():
                for name in self._last.gauges:
                    self._levels[name].append(self._last.values[name])

    async def _read(self) -> bool:
        """Read once; return whether there are metrics."""
        assert self._client is not None
        try:
            response = await self._client.get(self._url)
            response.raise_for_status()
            now = parse_metrics(response.text)
        except (httpx.HTTPError, ValueError):
            return False  # a server without metrics can be measured too
        if not now.values:
            return False
        self._last = now
        return True


def client_options(settings: RequestSettings, timeout: float) -> dict[str, Any]:
    """The arguments of httpx's clients for requests that are not measured."""
    return {
        "headers": settings.all_headers,
        "timeout": timeout,
        "verify": ssl.create_default_context(),
        "trust_env": False,  # measured requests use no proxy either
    }
