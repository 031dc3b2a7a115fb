"""Where models keep their chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tgi_cli.errors import ModelError
from tgi_cli.text.tokenizer import read_json

MOST_TEMPLATES = 32
MOST_BYTES = 1 << 20
"""Of one; the largest that are published have 40,000."""


def sources_of(model_path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template texts by name, from the newest to the oldest place that models keep them in.

    ``config`` is the model's tokenizer_config.json. Raises ModelError.
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
    """Template texts by name of a file's ``chat_template``. Raises ModelError."""
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
                "a chat template of the model, or its name, is no text", "mend `chat_template`"
            )
        if len(source) > MOST_BYTES:
            raise _too_large(f"the chat template `{name[:100]}`")
    return dict(entries)


def _read(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise _too_large(str(path))
    try:
        # A file that was written on Windows: lines end as they do for Python's text files.
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is no UTF-8: {error}", "download the model again") from error


def _too_large(what: str) -> ModelError:
    return ModelError(f"{what} has more than {MOST_BYTES} bytes", "use a smaller chat template")


def _too_many() -> ModelError:
    return ModelError(f"the model has more than {MOST_TEMPLATES} chat templates", "remove some")
