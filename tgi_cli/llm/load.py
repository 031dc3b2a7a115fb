"""Loads a model and starts its engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from tgi_cli import demo
from tgi_cli.config import ServeConfig
from tgi_cli.config.speculation import checked
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.disk_blocks import open_disk_blocks
from tgi_cli.engine.messages import EngineInfo
from tgi_cli.engine.speculation import create_speculator
from tgi_cli.errors import ConfigError
from tgi_cli.hub.download import download_progress
from tgi_cli.hub.lora_files import resolve_adapter, resolve_adapters, split_revision
from tgi_cli.hub.resolve import LocalModel, resolve_model
from tgi_cli.llm.engine import InProcessEngine
from tgi_cli.models.speculators.locate import locate_base, locate_drafter

log = logging.getLogger(__name__)


def locate(
    model: str | PathLike[str] | None, revision: str | None, trust_remote_code: bool
) -> tuple[LocalModel, Path | None]:
    """The folder of a model, downloaded if necessary, and of the draft heads that name it.

    As for ``tgi serve``: the bundled model by default, and the model that Medusa heads or an MLP
    speculator are for in place of these.

    Raises:
        HubError: The model is unavailable.
        ModelError: The model cannot be run.
    """
    if model is None:
        return LocalModel(demo.model_path(), demo.MODEL_ID, ""), None

    def find(name: str, revision: str | None = None) -> LocalModel:
        return resolve_model(
            name,
            revision=revision,
            trust_remote_code=trust_remote_code,
            progress=download_progress(),
        )

    return locate_base(find(fspath(model), revision), lambda found: found.path, find)


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


def read_speculative_config(given: Mapping[str, Any] | str | None) -> str | None:
    """vLLM's ``speculative_config``, a mapping or its JSON, as ``--speculative-config`` has it.

    Raises:
        ConfigError: It is invalid.
    """
    if given is None:
        return None
    try:
        return checked(given if isinstance(given, str) else json.dumps(dict(given)))
    except (TypeError, ValueError) as error:
        remedy = "correct it: docs/speculation.md has the keys"
        raise ConfigError(f"--speculative-config: {error}", remedy) from error


def with_drafter(serve: ServeConfig, heads: Path | None) -> ServeConfig:
    """Settings with the folder of the weights that draft, downloaded if necessary.

    Args:
        serve: May name them.
        heads: Those that the model was named by.

    Raises:
        ConfigError: Two settings name others.
        HubError: They are unavailable.
        ModelError: The folder has none.
    """
    if serve.speculative_model:
        serve = replace(serve, speculative_model=fspath(serve.speculative_model))
    return locate_drafter(serve, download_progress(), heads)


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

    worker, _ = load_worker(serve, model_path, own_process=False)
    capacity = worker.warmup()
    blocks = open_disk_blocks(capacity.config, worker, capacity.cache_bytes, capacity.step_seconds)

    def on_end() -> None:
        if blocks is not None:
            blocks.close()
        worker.close()

    info = worker.info()
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
        SchedulerConfig.after_warmup(capacity),
        capacity.config.depth,
        on_stats,
        info.model_id,
        on_end,
        worker.grammars,
        create_speculator(capacity.config, capacity.step_times, capacity.most_proposed),
        blocks,
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
