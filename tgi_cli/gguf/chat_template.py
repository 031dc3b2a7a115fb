"""Chat templates of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tgi_cli.gguf.reader import GGUFFile

_KEY = "tokenizer.chat_template"


def chat_templates(file: GGUFFile) -> dict[str, str]:
    """The templates by name; ``default`` is that of ``tokenizer.chat_template``.

    Others, such as ``tool_use`` and ``rag``, are those of ``tokenizer.chat_template.NAME``.

    Raises:
        CorruptFileError: a template is no string.
    """
    named = {
        key.removeprefix(f"{_KEY}."): file.get(key, str, "")
        for key in file.metadata
        if key.startswith(f"{_KEY}.")
    }
    default = file.get(_KEY, str, "")
    return ({"default": default} if default else {}) | named


def as_config(templates: Mapping[str, str]) -> Any:
    """Templates as tokenizer_config.json has them: one as a string, several as a list."""
    if [*templates] == ["default"]:
        return templates["default"]
    return [{"name": name, "template": source} for name, source in templates.items()]
