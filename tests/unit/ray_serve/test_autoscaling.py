"""The number of replicas that load asks for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tgi_cli.ray_serve.autoscaling import KV_USAGE, LoadPolicy


def context(requests: float, usages: list[float] | None) -> Any:
    metrics = None if usages is None else {KV_USAGE: dict(enumerate(usages))}
    return SimpleNamespace(
        total_num_requests=requests,
        aggregated_metrics=metrics,
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 10),
    )


@pytest.mark.parametrize(
    ("requests", "usages", "wanted"),
    [
        (20, [0.1, 0.1], 2.0),
        (35, [0.1, 0.1], 3.5),
        (5, [0.9, 0.7], 2.0),  # few requests with long contexts
        (5, [0.96, 0.96, 0.96], 3.6),
        (0, [0.0, 0.0], 0.0),
        (20, None, 2.0),
        (20, [], 2.0),
    ],
)
def test_requests_and_caches_whichever_need_more(
    requests: float, usages: list[float] | None, wanted: float
) -> None:
    found, state = LoadPolicy(target_kv_usage=0.8)(context(requests, usages))
    assert found == pytest.approx(wanted)
    assert state == {}
