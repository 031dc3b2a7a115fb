"""Detects a load generator that falls behind and distorts what it measures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from tgi_cli.bench.events import ClientHealth

_TICK = 0.01
_LAG = 0.1
_CPU = 0.9
_LATE = 0.1
_LEAST_SECONDS = 1.0
"""Least duration over which a share of CPU time is meaningful."""


class LagMonitor:
    """Measures the lag of the event loop, which delays all timestamps."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._wall = self._cpu = 0.0

    def start(self) -> None:
        """Start measuring."""
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        self._task = asyncio.ensure_future(self._tick())

    def stop(self, late: Sequence[float]) -> ClientHealth:
        """Stop measuring, if it was started; ``late`` are the seconds by which requests lagged."""
        if self._task is None:
            return ClientHealth()
        self._task.cancel()
        wall = time.perf_counter() - self._wall
        share = (time.process_time() - self._cpu) / wall if wall > 0 else 0.0
        found = assess(percentile(self._lags, 0.99), share, percentile(late, 0.99), wall)
        return msgspec.structs.replace(found, lag_p50=percentile(self._lags, 0.5))

    async def _tick(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_TICK)
            self._lags.append(max(0.0, time.perf_counter() - before - _TICK))


def assess(lag: float, cpu: float, late: float, seconds: float) -> ClientHealth:
    """Assess a client by its 99th percentile of lag and its CPU share over so many seconds."""
    reasons = []
    if lag > _LAG:
        reasons.append(f"its event loop lagged {lag * 1e3:.0f} ms (p99)")
    if cpu > _CPU and seconds >= _LEAST_SECONDS:
        reasons.append(f"it used {cpu:.0%} of a core")
    if late > _LATE:
        reasons.append(f"requests were started {late * 1e3:.0f} ms after they were due (p99)")
    reason = "the load generator was the bottleneck: " + ", ".join(reasons) if reasons else ""
    return ClientHealth(lag_p99=lag, cpu=cpu, late_p99=late, behind=bool(reasons), reason=reason)


def worst_of(clients: Sequence[ClientHealth]) -> ClientHealth:
    """The worst values of several processes."""
    if not clients:
        return ClientHealth()
    worst = [client for client in clients if client.behind]
    return ClientHealth(
        lag_p99=max(client.lag_p99 for client in clients),
        lag_p50=max(client.lag_p50 for client in clients),
        cpu=max(client.cpu for client in clients),
        late_p99=max(client.late_p99 for client in clients),
        behind=bool(worst),
        reason=worst[0].reason if worst else "",
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile, or 0 without values."""
    if not values:
        return 0.0
    ranked = sorted(values)
    return max(0.0, ranked[min(len(ranked) - 1, int(share * len(ranked)))])
