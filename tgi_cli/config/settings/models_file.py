"""The file of ``--models``: the models of one server, by name, with settings of each.

coder:
  model: Qwen/Qwen2.5-Coder-7B-Instruct
  quantize: int8
chat:
  model: ./my-model
  max-total-tokens: 8192
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tgi_cli.config.settings import settings_of
from tgi_cli.config.settings.file import RawValue, load_mapping, read_entries
from tgi_cli.config.settings.setting import SERVE
from tgi_cli.errors import ConfigError

MAX_MODELS = 256


def read_models(path: Path, refused: Collection[str]) -> dict[str, dict[str, RawValue]]:
    """The settings of each model, unparsed, by its name, in their order.

    Args:
        refused: Names of settings that are the server's, and not a model's.

    Raises:
        ConfigError: an unreadable file, an unknown key or an invalid value.
    """
    content = load_mapping(path, "--models")
    if not 1 <= len(content) <= MAX_MODELS:
        raise ConfigError(
            f"--models {path} has {len(content)} models", f"name 1 to {MAX_MODELS} of them"
        )
    settings = tuple(setting for setting in settings_of(SERVE) if setting.name not in refused)
    found = {}
    for name, entries in content.items():
        if entries is not None and not isinstance(entries, dict):
            raise ConfigError(
                f"{path}: {name} is not a section of keys and values",
                f"write `{name}:` and below it, indented, `model: MODEL`",
            )
        found[name] = dict(read_entries(path, f"{name}: ", entries or {}, settings))
    return found
