"""Loads a model and starts its engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike, fspath
from pathlib import Path

from tgi_cli import demo
from tgi_cli.config import ServeConfig
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.messages import EngineInfo
from tgi_cli.engine.speculation import create_speculator
from tgi_cli.hub import (
    LocalModel,
    download_progress,
    resolve_adapter,
    resolve_adapters,
    resolve_model,
)
from tgi_cli.hub.lora_files import split_revision
from tgi_cli.llm.engine import InProcessEngine

log = logging.getLogger(__name__)


def locate(
    model: str | PathLike[str] | None, revision: str | None, trust_remote_code: bool
) -> LocalModel:
    """The folder of a model, downloaded if necessary. Default: the bundled model.

    Raises:
        HubError: The model is unavailable.
        ModelError: The model cannot be run.
    """
    if model is None:
        return LocalModel(demo.model_path(), demo.MODEL_ID, "")
    return resolve_model(
        fspath(model),
        revision=revision,
        trust_remote_code=trust_remote_code,
        progress=download_progress(),
    )


def find_adapter(source: str | PathLike[str]) -> Path:
    """The folder of an adapter, downloaded if ``source`` is an id or ``id@revision`` on the hub.

    Raises:
        HubError: The adapter is unavailable.
        ModelError: The folder is not an adapter.
    """
    text = fspath(source)
    folder = Path(text).expanduser().is_dir()
    return resolve_adapter(text) if folder else resolve_adapter(*split_revision(text))


def find_adapters(
    named: Mapping[str, str | PathLike[str]] | Sequence[str] | str, model_id: str
) -> tuple[str, ...]:
    """Each adapter as ``name=path``, downloaded if necessary.

    Raises:
        ConfigError: A value or a name is invalid.
        HubError: An adapter is unavailable.
        ModelError: A folder is not an adapter.
    """
    if isinstance(named, Mapping):
        items = [f"{name}={fspath(source)}" for name, source in named.items()]
    else:
        items = [item.strip() for item in named.split(",")] if isinstance(named, str) else [*named]
    return tuple(map(str, resolve_adapters(items, model_id, download_progress())))


def with_drafter(serve: ServeConfig) -> ServeConfig:
    """Settings with the folder of the weights that draft, downloaded if necessary.

    Raises:
        HubError: They are unavailable.
        ModelError: The folder has none.
    """
    if not serve.speculative_model or serve.speculate == 0:
        return serve
    found = resolve_model(
        fspath(serve.speculative_model),
        trust_remote_code=serve.trust_remote_code,
        overridable=False,
        progress=download_progress(),
    )
    return replace(serve, speculative_model=str(found.path))


def start_engine(
    serve: ServeConfig,
    model_path: Path,
    on_stats: Callable[[str], None] | None,
) -> tuple[InProcessEngine, EngineInfo]:
    """Load a model and its adapters, warm it up and start its engine.

    Raises:
        ConfigError: Settings contradict each other or the model.
        ModelError: A file is missing or invalid.
        OutOfMemoryError: The model does not fit into memory.
        ShardError: Another process of the model cannot be started, or has ended.
    """
    from tgi_cli.worker.factory import load_worker  # imports torch

    worker, _ = load_worker(serve, model_path)
    capacity = worker.warmup()
    info = worker.info()
    limits = SchedulerConfig.of(
        capacity.config, capacity.num_blocks, capacity.kv_window, capacity.num_state_slots
    )
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
    engine = InProcessEngine(
        worker,
        limits,
        depth,
        on_stats,
        info.model_id,
        worker.close,
        worker.grammars,
        create_speculator(capacity.config, capacity.step_times, capacity.most_proposed),
    )
    worker.watch(engine.fail)
    try:
        for item in serve.lora_adapters:
            name, _, path = item.partition("=")
            engine.load_adapter(name, partial(Path, path))
    except BaseException:
        engine.close()
        raise
    return engine, info
