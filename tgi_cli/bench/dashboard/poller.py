"""A server's metrics over time, from its ``/metrics``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import httpx

from tgi_cli.bench.metrics_scrape import parse_metrics

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
        accepted_tokens: Their number.
        output, input: Tokens per second since the last sample.
    """

    at: float
    queued: float | None = None
    running: float | None = None
    kv: float | None = None
    hits: float | None = None
    accepted: float | None = None
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
        self._before: tuple[float, dict[str, float | None]] | None = None
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
            now, totals = self._clock(), read(response.text)
            history.samples.append(_sample(now, totals, self._before))
            self._before = (now, totals)
            known = any(value is not None for value in totals.values())
            history.error = "" if known else "no metrics of TGI, vLLM or SGLang"

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()

    def _failed(self, why: str) -> None:
        self.history.error = why
        self._before = None


def read(text: str) -> dict[str, float | None]:
    """The totals of an exposition, by our names, or None if it lacks them."""
    try:
        found = parse_metrics(text).values
    except ValueError:  # not an exposition
        found = {}
    return {
        name: next(
            (sum(found[n] for n in names) for names in choices if all(n in found for n in names)),
            None,
        )
        for name, choices in _NAMES.items()
    }


def _sample(
    now: float,
    totals: Mapping[str, float | None],
    before: tuple[float, Mapping[str, float | None]] | None,
) -> ServerSample:
    def grown(name: str) -> float | None:
        new = totals[name]
        old = before[1][name] if before is not None else None
        # A counter that shrank belongs to a server that was restarted.
        return None if new is None or old is None else (new - old if new >= old else new)

    def rate(name: str) -> float | None:
        more = grown(name)
        return None if more is None or before is None else more / max(now - before[0], 1e-3)

    looked_up, drafted = grown("looked_up"), grown("drafted")
    hits, accepted = grown("hits"), grown("accepted")
    return ServerSample(
        at=now,
        queued=totals["queued"],
        running=totals["running"],
        kv=totals["kv"],
        hits=hits / looked_up if hits is not None and looked_up else None,
        accepted=accepted / drafted if accepted is not None and drafted else None,
        accepted_tokens=accepted,
        output=rate("output"),
        input=rate("input"),
    )
