"""A router over two scripted engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from starlette.applications import Starlette

from tests.router.fakes import FakeEngine
from tgi_cli.router.app import create_app
from tgi_cli.router.config import RouterConfig
from tgi_cli.router.replicas.policy import CacheAwarePolicy
from tgi_cli.router.replicas.pool import EnginePool
from tgi_cli.text.bundle import TextBundle

LENGTH = 4096
"""Tokens of a request at most: prompts have several of the index's blocks."""


class FakeReplica(FakeEngine):
    """A scripted engine with what a pool needs besides; ``draining`` ones take no requests."""

    draining = False
    num_live = 0
    take_over: Callable[..., bool] | None = None

    @property
    def accepting(self) -> bool:
        return self.connected and not self.draining

    def is_live(self, request_id: int) -> bool:
        return any(request.request_id == request_id for request in self.requests)

    def on_refused(self, take_over: Callable[..., bool]) -> None:
        self.take_over = take_over


def pool_of(engines: list[Any], **thresholds: Any) -> EnginePool:
    own = {"cache_threshold": 0.25, "balance_abs_threshold": 4, "balance_rel_threshold": 1.5}
    tokens = {at: engine.info.max_batch_total_tokens for at, engine in enumerate(engines)}
    return EnginePool(engines, CacheAwarePolicy(tokens, **own | thresholds))


@pytest.fixture
def engines(text: TextBundle) -> list[FakeReplica]:
    engines = [FakeReplica(text.tokenizer) for _ in range(2)]
    for engine in engines:
        engine.info = replace(
            engine.info,
            max_input_tokens=LENGTH - 1,
            max_total_tokens=LENGTH,
            max_batch_total_tokens=4 * LENGTH,
        )
    return engines


@pytest.fixture
def pool(engines: list[FakeReplica]) -> EnginePool:
    return pool_of(engines)


@pytest.fixture
def app(
    pool: EnginePool, text: TextBundle, config: RouterConfig, settings: dict[str, Any]
) -> Starlette:
    return create_app(pool, text, replace(config, **settings))
