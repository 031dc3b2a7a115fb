"""What becomes of the router when another engine takes the place of the one that it knew."""

from __future__ import annotations

import logging
from dataclasses import fields, replace

from tgi_cli.engine.messages import EngineInfo
from tgi_cli.router.adapter_restore import DynamicAdapters
from tgi_cli.router.config import RouterConfig
from tgi_cli.router.generation.generator import Generator
from tgi_cli.router.observability.metrics import Metrics
from tgi_cli.rpc.interface import EngineClient

logger = logging.getLogger(__name__)

_MEASURED = {"load_seconds", "step_seconds", "weight_bytes"}
"""These differ between two starts of the same."""


class EngineRestart:
    """Hears of every new engine, and has the parts that know its limits take the new ones.

    What asks the client for its ``info`` each time needs no telling. Requests in flight have
    ended by then, and those that are still being prepared are looked at again
    (:meth:`tgi_cli.router.generation.generator.Generator.open`).
    """

    def __init__(
        self,
        client: EngineClient,
        config: RouterConfig,
        generator: Generator,
        metrics: Metrics,
        adapters: DynamicAdapters,
    ) -> None:
        self._client = client
        self._config = config
        self._generator = generator
        self._metrics = metrics
        self._adapters = adapters
        self._info = client.info
        generator.take(bounded(self._info, config))
        client.on_found(self._found)

    def _found(self, another: bool) -> None:
        if another:
            self._take_over()
        self._adapters.restore(another)

    def _take_over(self) -> None:
        before, self._info = self._info, self._client.info
        changes = ", ".join(
            f"{field.name} {new} (was {old})"
            for field in fields(EngineInfo)
            if field.name not in _MEASURED
            and (new := getattr(self._info, field.name)) != (old := getattr(before, field.name))
        )
        if changes:
            logger.warning("the model server came back with %s", changes)
        if (before.model_id, before.vocab_size) != (self._info.model_id, self._info.vocab_size):
            logger.error("the router has the tokenizer of %s: start it anew", before.model_id)
        self._generator.take(bounded(self._info, self._config))
        self._metrics.info = self._info


def bounded(info: EngineInfo, config: RouterConfig) -> EngineInfo:
    """What the engine says of itself, with limits that the router was told to keep to below it."""
    total = min(config.max_total_tokens or info.max_total_tokens, info.max_total_tokens)
    most = min(config.max_input_tokens or info.max_input_tokens, info.max_input_tokens)
    return replace(info, max_total_tokens=total, max_input_tokens=min(most, total - 1))
