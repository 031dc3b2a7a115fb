"""Finds the model and the adapters of a command, on this machine or on the hub."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from tgi_cli.config import ServeConfig
from tgi_cli.config.speculation import speculative_model
from tgi_cli.errors import ConfigError

log = logging.getLogger(__name__)


def locate_model(config: ServeConfig, weights: bool = True) -> tuple[ServeConfig, Path]:
    """Return ``config`` with the model's full name, and the model's folder.

    An empty id means the bundled model. The model is downloaded if necessary, without its weights
    if they are not needed.

    Raises:
        HubError, ModelError: The model is unavailable.
    """
    from tgi_cli import demo, hub

    if not config.model_id:
        log.info("no model named: serving the bundled miniature model, %s", demo.MODEL_ID)
        return replace(config, model_id=demo.MODEL_ID, revision=None), demo.model_path()
    model = hub.resolve_model(
        config.model_id,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        weights=weights and config.load_format != "dummy",
        progress=hub.download_progress(json_output=config.json_output),
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
    from tgi_cli import hub

    progress = hub.download_progress(json_output=config.json_output)
    adapters = hub.resolve_adapters(config.lora_adapters, config.model_id, progress)
    return replace(config, lora_adapters=tuple(map(str, adapters)))


def locate_drafter(config: ServeConfig) -> ServeConfig:
    """Return ``config`` with the folder of the weights that draft, downloaded if necessary.

    Raises:
        ConfigError: Two settings name others.
        HubError, ModelError: They are unavailable.
    """
    try:
        named = speculative_model(config.speculative_model, config.speculative_config)
    except ValueError as error:
        raise ConfigError(str(error), "leave one of them off") from error
    if named is None or config.speculate == 0:
        return config
    from tgi_cli import hub

    model = hub.resolve_model(
        named[0],
        revision=named[1],
        trust_remote_code=config.trust_remote_code,
        weights=config.load_format != "dummy",
        overridable=False,
        progress=hub.download_progress(json_output=config.json_output),
    )
    return replace(config, speculative_model=str(model.path))


def locate(config: ServeConfig) -> tuple[ServeConfig, Path]:
    """Return ``config`` with all names resolved, and the model's folder."""
    from tgi_cli.models.speculators.detect import base_model

    config, path = locate_model(config)
    base = base_model(path)
    if base is not None:  # as with TGI, which is given the heads and finds their model
        log.info("%s has heads that draft for %s", config.model_id, base)
        named, heads = config, path
        config, path = locate_model(replace(config, model_id=base, revision=None))
        config = replace(
            config,
            model_id=named.model_id,
            revision=named.revision,
            speculative_model=config.speculative_model or str(heads),
        )
    return locate_drafter(locate_adapters(config)), path
