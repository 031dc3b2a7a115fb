"""Settings from a YAML file: ``port: 8080`` for every command that takes it, or in a section.

port: 8080
max-total-tokens: 4096
router:
  max_best_of: 4
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tgi_cli.config.settings import COMMANDS, SETTINGS, Setting, settings_of
from tgi_cli.errors import ConfigError
from tgi_cli.files import FileRefusedError, read_yaml

Words = bool | str | list[str]
"""A value as a flag would have it: a switch, a word, or the words of a flag that is repeated."""


def read_file(path: Path, command: str) -> dict[str, Words]:
    """The settings of one command in a file, as words, by name.

    Keys may have dashes or underscores; a section beats what stands outside.

    Raises:
        ConfigError: the file cannot be read; a key is no setting; a value cannot be.
    """
    content = _load(path)
    sections = {name: content.pop(name) for name in list(content) if _section(name) is not None}
    found = dict(_entries(path, "", content, SETTINGS))
    own: dict[str, Words] = {}
    for name, entries in sections.items():
        section = _section(name)
        assert section is not None
        if entries is not None and not isinstance(entries, dict):
            raise ConfigError(f"{path}: {name} is not a section of keys and values")
        read = dict(_entries(path, f"{name}: ", entries or {}, settings_of(section)))
        if section == command:
            own |= read
    mine = {setting.name for setting in settings_of(command)}
    return {name: words for name, words in found.items() if name in mine} | own


def _load(path: Path) -> dict[str, Any]:
    try:
        content = read_yaml(path)
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
    except FileRefusedError as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from error
    except ValueError as error:
        cause = " ".join(str(error).split())
        raise ConfigError(f"--config {path} is not YAML: {cause}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"--config {path} does not consist of keys and values", "as port: 8080")
    return content


def _section(name: str) -> str | None:
    """The command whose section a key begins, if it is one."""
    command = name.replace("_", "-")
    return command if command in COMMANDS else None


def _entries(
    path: Path, where: str, entries: Mapping[Any, Any], settings: tuple[Setting, ...]
) -> Iterator[tuple[str, Words]]:
    known = {
        setting.name: setting
        for setting in settings
        if not setting.hidden and setting.name not in ("config", "env")
    }
    for key, value in entries.items():
        setting = known.get(str(key).replace("-", "_"))
        if setting is None:
            raise ConfigError(f"{path}: {where}{key!r} is not a setting", _meant(str(key), known))
        if value is None:
            continue
        try:
            words = _words(setting, value)
            for word in words if isinstance(words, list) else [str(words)]:
                setting.kind.read(word)
        except ValueError as error:
            raise ConfigError(f"{path}: {where}{key}: {error}") from error
        yield setting.name, words


def _words(setting: Setting, value: Any) -> Words:
    """A value of YAML as a flag would have it. Raises ValueError."""
    kind = setting.kind
    if isinstance(value, bool) and {"on", "off"} <= set(kind.choices):
        value = "on" if value else "off"  # which YAML took for a truth value
    if isinstance(value, bool) != (kind.type is bool):
        wanted = "true or false" if kind.type is bool else f"a value ({kind.metavar})"
        raise ValueError(f"{value!r} is not {wanted}")
    if isinstance(value, list) and kind.type in (list, tuple):
        parts = [str(part) for part in value]
        return parts if kind.type is list else ",".join(parts)
    if isinstance(value, bool):
        return value
    if not isinstance(value, (str, int, float)):
        raise ValueError(f"{value!r} is not one value")
    return [str(value)] if kind.type is list else str(value)


def _meant(key: str, known: Mapping[str, Setting]) -> str:
    close = get_close_matches(key.replace("-", "_"), known, n=1)
    return f"did you mean {close[0]}?" if close else "docs/configuration.md has all of them"
