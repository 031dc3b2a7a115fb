"""From a model's name to a running engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from os import PathLike, fspath
from pathlib import Path

from tgi_cli import demo
from tgi_cli.config import ServeConfig
from tgi_cli.engine.limits import Limits
from tgi_cli.engine.messages import EngineInfo
from tgi_cli.hub import LocalModel, pick_progress, resolve_model
from tgi_cli.offline.inprocess import InProcessEngine

log = logging.getLogger(__name__)


def locate(
    model: str | PathLike[str] | None, revision: str | None, trust_remote_code: bool
) -> LocalModel:
    """The folder of a model, downloaded if need be; None is the bundled one.

    Raises:
        HubError: it cannot be had.
        ModelError: it is there and cannot be run.
    """
    if model is None:
        return LocalModel(demo.model_path(), demo.MODEL_ID, "")
    return resolve_model(
        fspath(model),
        revision=revision,
        trust_remote_code=trust_remote_code,
        progress=pick_progress(),
    )


def start_engine(
    serve: ServeConfig,
    model_path: Path,
    on_stats: Callable[[str], None] | None,
) -> tuple[InProcessEngine, EngineInfo]:
    """Load a model, warm it up and run an engine over it.

    Raises:
        ConfigError: what contradicts itself or the model.
        ModelError: files that cannot be used.
        OutOfMemoryError: it does not fit.
    """
    from tgi_cli.worker.worker import load_worker  # brings torch

    worker, _ = load_worker(serve, model_path)
    capacity = worker.warmup()
    info = worker.info()
    limits = Limits.of(capacity.config, capacity.num_blocks, capacity.kv_window)
    depth = 0 if info.device == "cpu" else 1
    log.info(
        "%s in %s on %s, %d tokens in the cache, loaded in %.1f s, warmed up in %.1f s",
        info.model_id,
        info.dtype,
        info.device,
        info.max_batch_total_tokens,
        capacity.load_seconds,
        capacity.warmup_seconds,
    )
    return InProcessEngine(worker, limits, depth, on_stats), info
