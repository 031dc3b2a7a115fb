"""Reads the chat templates of a model folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tgi_cli.errors import ConfigError, ModelError
from tgi_cli.files import read_text
from tgi_cli.text.tokenizer import read_json

MOST_TEMPLATES = 32
MOST_BYTES = 1 << 20
"""Size of one template; the largest published ones have 40,000."""


def sources_of(model_path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template sources by name, from the newest kind of file that has any.

    Args:
        config: The model's tokenizer_config.json.

    Raises:
        ModelError: A file is invalid or too large.
    """
    sources: dict[str, str] = {}
    main = model_path / "chat_template.jinja"
    extra = model_path / "additional_chat_templates"
    if main.is_file():
        sources["default"] = _read(main)
    if extra.is_dir():
        paths = [path for path in extra.glob("*.jinja") if path.is_file()]
        if len(paths) > MOST_TEMPLATES:
            raise _too_many()
        sources |= {path.stem: _read(path) for path in sorted(paths)}
    if sources:
        return sources
    for holder in (
        read_json(model_path / "chat_template.json"),
        config,
        read_json(model_path / "processor_config.json"),
    ):
        sources = of_holder(holder)
        if sources:
            return sources
    return {}


def of_holder(holder: Mapping[str, Any]) -> dict[str, str]:
    """Template sources by name in ``chat_template`` of a JSON file. Raises ModelError."""
    value = holder.get("chat_template")
    entries: list[tuple[Any, Any]] = []
    if isinstance(value, str):
        entries = [("default", value)]
    elif isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, list):
        entries = [
            (entry["name"], entry["template"])
            for entry in value
            if isinstance(entry, dict) and {"name", "template"} <= set(entry)
        ]
    if len(entries) > MOST_TEMPLATES:
        raise _too_many()
    for name, source in entries:
        if not isinstance(name, str) or not isinstance(source, str):
            raise ModelError(
                "a chat template of the model, or its name, is not a string", "fix `chat_template`"
            )
        if len(source) > MOST_BYTES:
            raise _too_large(f"the chat template `{name[:100]}`")
    return dict(entries)


def given_source(value: str) -> str:
    """The template that ``--chat-template`` gives: its source, or the file that has it.

    Raises:
        ConfigError: There is no such file, or it cannot be read.
    """
    if "{{" in value or "{%" in value:
        return value
    path = Path(value)
    if not path.is_file():
        raise ConfigError(
            f"--chat-template {value} is not a file",
            "give the path of a Jinja file, or the template itself",
        )
    try:
        return _text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat-template {value} cannot be read: {error}") from error


def _read(path: Path) -> str:
    try:
        return _text(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", "download the model again") from error


def _text(path: Path) -> str:
    # Files from Windows: normalize line ends as Python's text files do.
    return read_text(path, MOST_BYTES).replace("\r\n", "\n").replace("\r", "\n")


def _too_large(what: str) -> ModelError:
    return ModelError(f"{what} has more than {MOST_BYTES} bytes", "use a smaller chat template")


def _too_many() -> ModelError:
    return ModelError(f"the model has more than {MOST_TEMPLATES} chat templates", "remove some")
