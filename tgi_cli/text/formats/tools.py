"""All formats of tool calls that are known by name."""

from __future__ import annotations

from tgi_cli.text.formats.json_formats import JSON_FORMATS
from tgi_cli.text.formats.markup_formats import MARKUP_FORMATS
from tgi_cli.text.formats.syntax import ToolFormat

TOOL_FORMATS: dict[str, ToolFormat] = {**MARKUP_FORMATS, **JSON_FORMATS}
"""Tool formats by the names of ``--tool-call-parser``; the first that fits is used."""
