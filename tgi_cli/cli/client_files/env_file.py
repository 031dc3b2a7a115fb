"""Environment variables, one a line, edited in place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_VARIABLE = re.compile(r"^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)[ \t]*=[ \t]*(.*?)[ \t]*$", re.M)


def dump_env(new: Mapping[str, Any]) -> str:
    """Write variables as ``NAME=value`` lines."""
    return "".join(f"{name}={value}\n" for name, value in new.items())


def parse_env(text: str) -> dict[str, str]:
    """The variables of ``NAME=value`` lines."""
    return dict(_VARIABLE.findall(text))


def merge_env(text: str, new: Mapping[str, Any]) -> str:
    """Merge variables into ``NAME=value`` lines."""
    missing = dict(new)

    def replaced(found: re.Match[str]) -> str:
        if found[1] not in new:
            return found[0]
        missing.pop(found[1], None)
        return f"{found[1]}={new[found[1]]}"

    text = _VARIABLE.sub(replaced, text)
    if text and not text.endswith("\n"):
        text += "\n"
    return text + dump_env(missing)
