"""A server's metrics over time, from its ``/metrics``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import httpx

from tgi_cli.bench.metrics_scrape import parse_metrics
from tgi_cli.bench.statistics.drafts import SourceDraftCounts, drafts_by_source

INTERVAL = 1.0
"""Seconds between samples."""
TIMEOUT = 5.0
MAX_SAMPLES = 900
"""Samples in the history: a quarter of an hour."""

# The first choice that the server has counts; several metrics are summed.
_NAMES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "queued": (("tgi_queue_size",),),
    "running": (("tgi_batch_current_size",),),
    "kv": (("tgi_kv_cache_usage_ratio",),),
    "hits": (("tgi_prefix_cache_hit_tokens_total",),),
    "looked_up": (("tgi_prefix_cache_query_tokens_total",),),
    "drafted": (("tgi_draft_tokens_total",),),
    "accepted": (("tgi_draft_accepted_tokens_total",),),
    "output": (
        (
            "tgi_request_inter_token_seconds_count",
            "tgi_request_time_to_first_token_seconds_count",
        ),
        ("tgi_request_generated_tokens_sum",),
    ),
    "input": (("tgi_engine_prompt_tokens_total",), ("tgi_request_input_length_sum",)),
}


@dataclass(frozen=True, slots=True)
class ServerSample:
    """A sample of the metrics; None if the server lacks them.

    Attributes:
        at: Seconds on the clock of the poller.
        queued, running: Requests.
        kv: Share of the KV cache in use, 0 to 1.
        hits: Share of the prompt tokens since the last sample that were in the prefix cache.
        accepted: Share of the draft tokens verified since the last sample that were accepted.
        accepted_by_source: The same of each source that any of them came from.
        accepted_tokens: The number of the accepted ones.
        output, input: Tokens per second since the last sample.
    """

    at: float
    queued: float | None = None
    running: float | None = None
    kv: float | None = None
    hits: float | None = None
    accepted: float | None = None
    accepted_by_source: dict[str, float] = field(default_factory=dict)
    accepted_tokens: float | None = None
    output: float | None = None
    input: float | None = None


@dataclass(slots=True)
class ServerHistory:
    """The samples of a server.

    Attributes:
        error: Error of the latest scrape; empty if it succeeded.
        version: Grows with every scrape.
    """

    url: str
    samples: deque[ServerSample] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    error: str = ""
    version: int = 0


class ServerPoller:
    """Scrapes one server.

    Args:
        url: Root of the server; ``/metrics`` is appended.
        transport: httpx's transport, for tests.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._address = f"{url.rstrip('/').removesuffix('/v1')}/metrics"
        self._client = httpx.AsyncClient(
            headers=dict(headers or {}), timeout=TIMEOUT, transport=transport
        )
        self._before: ServerTotals | None = None
        self.history = ServerHistory(self._address)

    async def ask(self) -> None:
        """Take one sample, or record the error."""
        history = self.history
        history.version += 1
        try:
            response = await self._client.get(self._address)
            response.raise_for_status()
        except httpx.HTTPStatusError as error:
            self._failed(f"HTTP {error.response.status_code}")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._failed(str(error) or type(error).__name__)
        else:
            totals = read(response.text, self._clock())
            history.samples.append(_sample(totals, self._before))
            self._before = totals
            known = any(value is not None for value in totals.values.values())
            history.error = "" if known else "no metrics of TGI, vLLM or SGLang"

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()

    def _failed(self, why: str) -> None:
        self.history.error = why
        self._before = None


@dataclass(frozen=True, slots=True)
class ServerTotals:
    """What a server has counted.

    Attributes:
        at: Seconds on the clock of the poller.
        values: By our names; None if the server lacks them.
        drafts: Draft tokens by where they came from.
    """

    at: float
    values: dict[str, float | None]
    drafts: dict[str, SourceDraftCounts]


def read(text: str, at: float) -> ServerTotals:
    """Read the totals of an exposition."""
    try:
        found = parse_metrics(text).values
    except ValueError:  # not an exposition
        found = {}
    values = {
        name: next(
            (sum(found[n] for n in names) for names in choices if all(n in found for n in names)),
            None,
        )
        for name, choices in _NAMES.items()
    }
    return ServerTotals(at, values, drafts_by_source(found))


def _sample(totals: ServerTotals, before: ServerTotals | None) -> ServerSample:
    def grown(name: str) -> float | None:
        new = totals.values[name]
        old = before.values[name] if before is not None else None
        return None if new is None or old is None else _growth(new, old)

    def rate(name: str) -> float | None:
        more = grown(name)
        return None if more is None or before is None else more / max(totals.at - before.at, 1e-3)

    looked_up, drafted = grown("looked_up"), grown("drafted")
    hits, accepted = grown("hits"), grown("accepted")
    return ServerSample(
        at=totals.at,
        queued=totals.values["queued"],
        running=totals.values["running"],
        kv=totals.values["kv"],
        hits=hits / looked_up if hits is not None and looked_up else None,
        accepted=accepted / drafted if accepted is not None and drafted else None,
        accepted_by_source={} if before is None else _shares(totals.drafts, before.drafts),
        accepted_tokens=accepted,
        output=rate("output"),
        input=rate("input"),
    )


def _growth(new: float, old: float) -> float:
    """A counter's growth since the last sample, from 0 if the server was restarted."""
    return new - old if new >= old else new


def _shares(
    now: dict[str, SourceDraftCounts], before: dict[str, SourceDraftCounts]
) -> dict[str, float]:
    """Share of the drafts verified since the last sample that were accepted, by source."""
    grown = {
        source: SourceDraftCounts(*map(_growth, counts, before.get(source, (0.0, 0.0))))
        for source, counts in now.items()
    }
    return {source: counts.share for source, counts in grown.items() if counts.verified}
