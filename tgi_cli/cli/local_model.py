"""Finds the model and the adapters of a command, on this machine or on the hub."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from tgi_cli.config import ServeConfig

log = logging.getLogger(__name__)


def locate_model(config: ServeConfig, weights: bool = True) -> tuple[ServeConfig, Path]:
    """Return ``config`` with the model's full name, and the model's folder.

    An empty id means the bundled model. The model is downloaded if necessary, without its weights
    if they are not needed.

    Raises:
        HubError, ModelError: The model is unavailable.
    """
    from tgi_cli import demo
    from tgi_cli.hub.download import download_progress
    from tgi_cli.hub.resolve import resolve_model

    if not config.model_id and config.model_gguf is None:
        log.info("no model named: serving the bundled miniature model, %s", demo.MODEL_ID)
        return replace(config, model_id=demo.MODEL_ID, revision=None), demo.model_path()
    model = resolve_model(
        config.model_id,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        weights=weights and config.load_format != "dummy",
        stream=weights and config.load_format == "stream",
        gguf=config.model_gguf,
        tokenizer=config.tokenizer_name,
        progress=download_progress(json_output=config.json_output),
    )
    return replace(config, model_id=model.model_id, revision=model.revision or None), model.path


def locate_adapters(config: ServeConfig) -> ServeConfig:
    """Return ``config`` with each adapter as ``name=path``; adapters are downloaded if necessary.

    Raises:
        ConfigError: An adapter's form or name is invalid.
        HubError, ModelError: An adapter is unavailable, or is not an adapter.
    """
    if not config.lora_adapters:
        return config
    from tgi_cli.hub.download import download_progress
    from tgi_cli.hub.lora_files import resolve_adapters

    progress = download_progress(json_output=config.json_output)
    adapters = resolve_adapters(config.lora_adapters, config.model_id, progress)
    return replace(config, lora_adapters=tuple(map(str, adapters)))


def locate_drafter(config: ServeConfig, heads: Path | None = None) -> ServeConfig:
    """Return ``config`` with the folder of the weights that draft, downloaded if necessary.

    Raises as :func:`tgi_cli.models.speculators.locate.locate_drafter`, which has the arguments.
    """
    from tgi_cli.hub.download import download_progress
    from tgi_cli.models.speculators import locate

    progress = download_progress(json_output=config.json_output)
    return locate.locate_drafter(config, progress, heads)


def locate(config: ServeConfig) -> tuple[ServeConfig, Path]:
    """Return ``config`` with all names resolved, and the model's folder."""
    from tgi_cli.models.speculators.locate import locate_base

    def find(model_id: str) -> tuple[ServeConfig, Path]:
        return locate_model(replace(config, model_id=model_id, revision=None, model_gguf=None))

    (found, path), heads = locate_base(locate_model(config), lambda each: each[1], find)
    return locate_drafter(locate_adapters(found), heads), path
