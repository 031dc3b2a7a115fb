"""TOML with values at the top and in tables, edited in place."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

_TABLE = re.compile(r"^[ \t]*\[")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ValueError."""
    return tomllib.loads(text)


def dump_toml(new: Mapping[str, Any]) -> str:
    """Write settings as TOML; nested objects as tables."""
    return merge_toml("", new)


def merge_toml(text: str, new: Mapping[str, Any]) -> str:
    """Merge settings into TOML: strings and integers, at the top and in tables.

    None removes a value.
    """
    lines = text.splitlines()
    for path, values in _tables(new):
        _merge_table(lines, path, values)
    return "\n".join(lines).lstrip("\n") + "\n"


def _tables(
    new: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    values = {key: value for key, value in new.items() if not isinstance(value, Mapping)}
    if values:
        yield path, values
    for key, value in new.items():
        if isinstance(value, Mapping):
            yield from _tables(value, (*path, key))


def _merge_table(lines: list[str], path: tuple[str, ...], values: Mapping[str, Any]) -> None:
    """Set the values of one table; those of the top level stand before all tables."""
    dotted = r"\s*\.\s*".join(rf'"?{re.escape(part)}"?' for part in path)
    header = re.compile(rf"^\s*\[\s*{dotted}\s*\]\s*(?:#.*)?$")
    start = 0
    if path:
        found = [number for number, line in enumerate(lines) if header.match(line)]
        if not found:
            lines += ["", f"[{'.'.join(path)}]"]
        start = found[0] + 1 if found else len(lines)
    later = [number for number in range(start, len(lines)) if _TABLE.match(lines[number])]
    end = later[0] if later else len(lines)
    added, removed = [], []
    for key, value in values.items():
        line = f"{key} = {json.dumps(value, ensure_ascii=False)}"
        setting = re.compile(rf'^\s*"?{re.escape(key)}"?\s*=')
        place = next((n for n in range(start, end) if setting.match(lines[n])), None)
        if value is None:
            removed += [] if place is None else [place]
        elif place is None:
            added.append(line)
        else:
            lines[place] = line
    while end > start and not lines[end - 1].strip():
        end -= 1
    lines[end:end] = added
    for place in sorted(removed, reverse=True):
        del lines[place]
