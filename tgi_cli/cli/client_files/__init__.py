"""Merges settings into the files of clients, leaving the rest of a file as it is.

The text is edited in place, so that comments, order and layout stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tgi_cli.cli.client_files.env_file import dump_env, merge_env, parse_env
from tgi_cli.cli.client_files.json_file import dump_json, merge_json, parse_json
from tgi_cli.cli.client_files.toml_file import dump_toml, merge_toml, parse_toml
from tgi_cli.cli.client_files.yaml_file import dump_yaml, merge_yaml, parse_yaml


@dataclass(frozen=True, slots=True)
class Format:
    """A file format: how to parse, write and edit it. ``parse`` and ``merge`` raise ValueError."""

    parse: Callable[[str], Any]
    dump: Callable[[Mapping[str, Any]], str]
    merge: Callable[[str, Mapping[str, Any]], str]


FORMATS = {
    "json": Format(parse_json, dump_json, merge_json),
    "toml": Format(parse_toml, dump_toml, merge_toml),
    "yaml": Format(parse_yaml, dump_yaml, merge_yaml),
    "env": Format(parse_env, dump_env, merge_env),
}
"""File formats by name."""
