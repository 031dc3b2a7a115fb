"""Finds the weights that draft for a model, and the model that draft heads are for. No torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tgi_cli.config import ServeConfig
from tgi_cli.config.speculation import speculative_model
from tgi_cli.errors import ConfigError
from tgi_cli.hub.resolve import resolve_model
from tgi_cli.models.speculators.detect import base_model
from tgi_cli.process.progress import ProgressReporter

log = logging.getLogger(__name__)

Found = TypeVar("Found")


def locate_base(
    found: Found, folder: Callable[[Found], Path], find: Callable[[str], Found]
) -> tuple[Found, Path | None]:
    """The model that a name stands for, and the draft heads that it names, if it does.

    As with TGI, the name of Medusa heads or of an MLP speculator stands for the model that they are
    for, with them as its drafter.

    Args:
        found: what the name stands for, resolved.
        folder: returns its folder.
        find: resolves another name, at its main branch.

    Returns:
        ``found`` itself and None, or the model and the folder of the heads.

    Raises:
        HubError, ModelError: the model is unavailable.
    """
    heads = folder(found)
    base = base_model(heads)
    if base is None:
        return found, None
    log.info("%s has heads that draft for %s", heads, base)
    return find(base), heads


def locate_drafter(
    config: ServeConfig, progress: ProgressReporter, heads: Path | None = None
) -> ServeConfig:
    """Return ``config`` with the folder of the weights that draft, downloaded if necessary.

    Args:
        config: may name them as ``--speculative-model`` or in ``--speculative-config``.
        progress: progress of the download.
        heads: those that the model was named by, used if ``config`` names none.

    Raises:
        ConfigError: two settings name others, or one is invalid.
        HubError, ModelError: they are unavailable.
    """
    try:
        named = speculative_model(config.speculative_model, config.speculative_config)
    except ValueError as error:
        raise ConfigError(str(error), "leave one of them off") from error
    if config.speculate == 0:
        return config
    if named is None:
        return config if heads is None else replace(config, speculative_model=str(heads))
    model = resolve_model(
        named[0],
        revision=named[1],
        trust_remote_code=config.trust_remote_code,
        weights=config.load_format != "dummy",
        overridable=False,
        progress=progress,
    )
    return replace(config, speculative_model=str(model.path))
