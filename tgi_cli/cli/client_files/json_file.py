"""JSON with comments and trailing commas, which editors accept, edited in place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tgi_cli.cli.client_files.merging import has_objects, place_of
from tgi_cli.files import MAX_DEPTH

_SKIPPED = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_REST_OF_LINE = re.compile(r"(?P<comma>,?)[ \t]*(?P<comment>(?://[^\n]*)?)")
_SCALAR = re.compile(r'"(?:[^"\\\n]|\\.)*"|[-+.\w]+')


@dataclass(slots=True)
class _Node:
    """A value, and where it is in the text."""

    start: int
    value: Any
    end: int = 0
    members: dict[str, _Node] = field(default_factory=dict)
    items: list[_Node] = field(default_factory=list)


class _Json:
    """A parser of JSON with comments and trailing commas, which editors accept."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def document(self) -> _Node:
        root = self._value(0)
        if self._next():
            raise ValueError(f"unexpected text at character {self.at}")
        return root

    def _next(self) -> str:
        """The first character after white space and comments."""
        skipped = _SKIPPED.match(self.text, self.at)
        assert skipped is not None  # it matches the empty string
        self.at = skipped.end()
        return self.text[self.at : self.at + 1]

    def _value(self, depth: int) -> _Node:
        if depth > MAX_DEPTH:
            raise ValueError(f"it nests more than {MAX_DEPTH} arrays and objects")
        opening = self._next()
        node = _Node(self.at, None)
        if opening in ("{", "["):
            self.at += 1
            self._children(node, opening == "{", depth)
        else:
            found = _SCALAR.match(self.text, self.at)
            if found is None:
                raise ValueError(f"expected a value at character {self.at}")
            node.value = json.loads(found[0])
            self.at = found.end()
        node.end = self.at
        return node

    def _children(self, node: _Node, is_object: bool, depth: int) -> None:
        while self._next() not in ("}", "]"):
            if is_object:
                key = self._value(depth + 1).value
                if not isinstance(key, str) or self._next() != ":":
                    raise ValueError(f"expected a key at character {self.at}")
                self.at += 1
                node.members[key] = self._value(depth + 1)
            else:
                node.items.append(self._value(depth + 1))
            if self._next() == ",":
                self.at += 1
            elif self._next() not in ("}", "]"):
                raise ValueError(f"expected a comma at character {self.at}")
        if self._next() != ("}" if is_object else "]"):
            raise ValueError(f"unexpected bracket at character {self.at}")
        self.at += 1
        if is_object:
            node.value = {key: child.value for key, child in node.members.items()}
        else:
            node.value = [child.value for child in node.items]


def parse_json(text: str) -> Any:
    """Parse JSON with comments and trailing commas. Raises ValueError."""
    return _Json(text).document().value


def merge_json(text: str, new: Mapping[str, Any]) -> str:
    """Merge settings into JSON with comments. Raises ValueError."""
    edits = list(_json_edits(text, _Json(text).document(), new))
    for start, end, replacement in sorted(edits, reverse=True):
        text = text[:start] + replacement + text[end:]
    return text


def _json_edits(text: str, node: _Node, new: Any) -> Iterator[tuple[int, int, str]]:
    """Replacements of parts of the text: start, end, new part."""
    if isinstance(new, Mapping) and isinstance(node.value, dict):
        missing = []
        for key, value in new.items():
            if key in node.members:
                yield from _json_edits(text, node.members[key], value)
            else:
                missing.append((json.dumps(key, ensure_ascii=False) + ": ", value))
        yield from _json_additions(text, node, [*node.members.values()], missing)
    elif isinstance(new, list) and isinstance(node.value, list) and has_objects(new):
        places = [(place_of(node.value, item), item) for item in new]
        for place, item in places:
            if place is not None:
                yield from _json_edits(text, node.items[place], item)
        missing = [("", item) for place, item in places if place is None]
        yield from _json_additions(text, node, node.items, missing)
    elif new != node.value:
        yield node.start, node.end, _json_text(new, _indentation(text, node.start))


def _json_additions(
    text: str, node: _Node, children: list[_Node], missing: list[tuple[str, Any]]
) -> Iterator[tuple[int, int, str]]:
    """Insert members after the last one, items before the first one."""
    if not missing:
        return
    if not children:
        outer = _indentation(text, node.start)
        parts = [f"\n{outer}  {key}{_json_text(value, outer + '  ')}" for key, value in missing]
        yield node.end - 1, node.end - 1, ",".join(parts) + f"\n{outer}"
        return
    lines = "\n" in text[node.start : node.end]
    first, last = min(c.start for c in children), max(c.end for c in children)
    pad = _indentation(text, first) if lines else ""
    gap = f",\n{pad}" if lines else ", "
    parts = [
        key + (_json_text(value, pad) if lines else json.dumps(value, ensure_ascii=False))
        for key, value in missing
    ]
    if not node.members:
        yield first, first, gap.join(parts) + gap
        return
    rest = _REST_OF_LINE.match(text, last)
    assert rest is not None  # it matches the empty string
    if not lines or not rest["comment"]:
        yield last, last, gap + gap.join(parts)
    else:  # the comment stays beside the last member
        yield last, last + len(rest["comma"]), ","
        yield rest.end(), rest.end(), f"\n{pad}" + gap.join(parts) + rest["comma"]


def _indentation(text: str, place: int) -> str:
    """The white space at the beginning of a line."""
    line = text[text.rfind("\n", 0, place) + 1 : place]
    return line[: len(line) - len(line.lstrip())]


def _json_text(value: Any, pad: str) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False).replace("\n", f"\n{pad}")


def dump_json(new: Mapping[str, Any]) -> str:
    """Write settings as JSON."""
    return json.dumps(new, indent=2, ensure_ascii=False) + "\n"
