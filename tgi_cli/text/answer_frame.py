"""What stands around the content of an answer, for whoever constrains the content alone.

A model that reasons does so before it answers; what the answer must be concerns only what comes
behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tgi_cli.text.response_reader import REASONING


@dataclass(frozen=True, slots=True)
class Frame:
    """The texts around reasoning, and the one in front of the content; empty: there is none."""

    open: str = ""
    close: str = ""
    then: str = ""

    def before(self, inside: bool) -> dict[str, Any] | None:
        """The frame for :meth:`~tgi_cli.text.grammar.grammar.Grammar.behind`.

        ``inside``: generation starts within reasoning.

        None where there is nothing but content.
        """
        if not self.open and not self.then:
            return None
        return {"open": self.open, "close": self.close, "then": self.then, "inside": inside}


def frame_of(template: Mapping[str, Any]) -> Frame:
    """Of a response template whose marks are texts, as far as they are."""
    fields = template["fields"]
    then = _text(fields.get("content", {}), "open")
    # Where even the content is marked, a turn of its own follows the reasoning's.
    turn = template.get("start_anchor", "") if then else ""
    for name in REASONING:
        region = fields.get(name, {})
        opening, close = _text(region, "open"), _text(region, "close")
        if opening and close:
            return Frame(opening, close + turn, then)
    return Frame(then=then)


def _text(region: Mapping[str, Any], key: str) -> str:
    """The first of its marks."""
    found = region.get(key, "")
    if isinstance(found, list | tuple):
        found = found[0] if found else ""
    return found if isinstance(found, str) else ""
