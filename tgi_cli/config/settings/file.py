"""Settings from a YAML file: a key applies to every command that takes it, or to its section.

port: 8080
max-total-tokens: 4096
router:
  max_best_of: 4
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tgi_cli.config.settings import SETTINGS, settings_of
from tgi_cli.config.settings.setting import COMMANDS, DEPLOY, SERVE, Setting
from tgi_cli.errors import ConfigError
from tgi_cli.files import FileRefusedError, read_yaml

RawValue = bool | str | list[str]
"""A value as on a command line: a switch, a word, or the words of a repeated flag."""


def read_file(path: Path, command: str) -> dict[str, RawValue]:
    """The settings of one command in a file, unparsed, by name.

    Keys may have dashes or underscores; sections override what is outside.

    Raises:
        ConfigError: an unreadable file, an unknown key or an invalid value.
    """
    content = load_mapping(path)
    sections = {name: content.pop(name) for name in list(content) if _section(name) is not None}
    own = settings_of(command)
    known = {s.name for s in own}
    # Of several settings with one name, this command's comes first.
    settings = (*own, *SETTINGS)
    found = {n: value for n, value in read_entries(path, "", content, settings) if n in known}
    for name, entries in sections.items():
        section = _section(name)
        assert section is not None
        if entries is not None and not isinstance(entries, dict):
            raise ConfigError(f"{path}: {name} is not a section of keys and values")
        values = dict(read_entries(path, f"{name}: ", entries or {}, settings_of(section)))
        if section == command or (command == DEPLOY and section == SERVE):
            found |= values
    return found


def load_mapping(path: Path, flag: str = "--config") -> dict[str, Any]:
    """Read a YAML file of keys and values, which ``flag`` names. Raises ConfigError."""
    try:
        content = read_yaml(path)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from error
    except FileRefusedError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error}") from error
    except ValueError as error:
        cause = " ".join(str(error).split())
        raise ConfigError(f"{flag} {path} is not YAML: {cause}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{flag} {path} does not consist of keys and values", "as port: 8080")
    return content


def _section(name: str) -> str | None:
    """The command that a key names, if it does."""
    command = name.replace("_", "-")
    return command if command in COMMANDS else None


def read_entries(
    path: Path, where: str, entries: Mapping[Any, Any], settings: tuple[Setting, ...]
) -> Iterator[tuple[str, RawValue]]:
    """Check the entries of a section against ``settings``. Raises ConfigError."""
    known = {
        setting.name: setting
        for setting in reversed(settings)
        if not setting.hidden and setting.name not in ("config", "env")
    }
    for key, value in entries.items():
        setting = known.get(str(key).replace("-", "_"))
        if setting is None:
            close = get_close_matches(str(key).replace("-", "_"), known, n=1)
            remedy = f"did you mean {close[0]}?" if close else "docs/configuration.md lists them"
            raise ConfigError(f"{path}: {where}{key!r} is not a setting", remedy)
        if value is None:
            continue
        try:
            raw = _raw(setting, value)
            for word in raw if isinstance(raw, list) else [str(raw)]:
                setting.kind.read(word)
        except ValueError as error:
            raise ConfigError(f"{path}: {where}{key}: {error}") from error
        yield setting.name, raw


def _raw(setting: Setting, value: Any) -> RawValue:
    """A YAML value as on a command line. Raises ValueError."""
    kind = setting.kind
    if isinstance(value, bool) and {"on", "off"} <= set(kind.choices):
        value = "on" if value else "off"  # YAML 1.1 reads these as booleans
    if isinstance(value, bool) != (kind.type is bool):
        wanted = "true or false" if kind.type is bool else f"a value ({kind.metavar})"
        raise ValueError(f"{value!r} is not {wanted}")
    if isinstance(value, list) and kind.type in (list, tuple):
        parts = [str(part) for part in value]
        return parts if kind.type is list else ",".join(parts)
    if isinstance(value, bool):
        return value
    if isinstance(value, dict) and kind.metavar == "JSON":
        return json.dumps(value)
    if not isinstance(value, (str, int, float)):
        raise ValueError(f"{value!r} is not one value")
    return [str(value)] if kind.type is list else str(value)
