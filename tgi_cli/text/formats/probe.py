"""Probes of a chat template: what it writes for a message with one call, two calls, and text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tgi_cli.text.formats.read import read_calls
from tgi_cli.text.formats.syntax import ToolFormat

Render = Callable[[Sequence[Mapping[str, Any]], bool], str | None]
"""Renders messages with or without a generation prompt; None if the template refuses them."""

NAMES = ("probe_alpha", "probe_beta")
TEXT, NUMBER = "Probe text", 41725
ARGUMENTS: dict[str, Any] = {"key_one": TEXT, "key_three": True, "key_two": NUMBER}
_ANSWER = "Probe answer."
_USER = {"role": "user", "content": "Probe question."}
_TOKEN = re.compile(r"\s+|<[^<>\n]*>?|\[/?[A-Z_]+\]|[^<\s\[]+|\[")
LONGEST_MARK = 80


@dataclass(frozen=True, slots=True)
class Probe:
    """What a template writes around calls.

    Attributes:
        start: White space in front of ``head``.
        head: In front of the first name.
        body: After the first name.
        second: After the first name if another call follows, or None if the template has one call
            at most.
        ending: After the text of a message without calls.
    """

    start: str
    head: str
    body: str
    second: str | None
    ending: str

    @property
    def text(self) -> str:
        """The message with one call, without its end."""
        text = self.start + self.head + NAMES[0] + self.body
        return text.removesuffix(self.ending) if self.ending.strip() else text

    def is_read(self, form: ToolFormat) -> bool:
        """Whether a parser of a format finds the call."""
        return read_calls(form, self.text) == [(NAMES[0], ARGUMENTS)]

    def rest(self, end: int) -> str:
        """After the call that ends at ``end`` in ``body``, without the end of the message."""
        rest = self.body[end:]
        if self.ending.strip() and rest.endswith(self.ending):
            return rest[: len(rest) - len(self.ending)]
        if rest.strip() in ("", self.ending.strip()):
            return ""
        # The message ends otherwise than one with text: the first mark belongs to the call.
        tokens = tokens_of(rest)
        marks = [index for index, token in enumerate(tokens) if token[0] in "<["]
        return "".join(tokens[: marks[0] + 1]) if marks else rest

    def between(self, end: int) -> str | None:
        """Text between two calls, of which the first ends at ``end``, up to the second name."""
        if self.second is None:
            return None
        second = self.second.find(NAMES[1])
        return self.second[end:second] if second >= end else None


def probe_calls(render: Render, closes: Sequence[str] = ()) -> Probe | None:
    """Render calls; None if the template writes none.

    Args:
        render: Renders messages together with some tools; calls have objects as arguments.
        closes: Closing marks of reasoning; a template may write an empty one in front of calls.
    """
    plain = render([_USER, {"role": "assistant", "content": _ANSWER}], False)
    prompt = render([_USER], True)
    one, two = (render([_USER, _calling(count)], False) for count in (1, 2))
    if one is None or prompt is None or NAMES[0] not in one or TEXT not in one:
        return None
    start = _common_length(one, prompt)
    ending = ""
    if plain is not None and _ANSWER in plain:
        start = max(start, _common_length(one, plain))
        ending = plain[plain.rindex(_ANSWER) + len(_ANSWER) :]
    argument = one.find(TEXT, start)
    key = min(filter(lambda at: at >= 0, (one.find(k, start) for k in ARGUMENTS)), default=-1)
    name = one.rfind(NAMES[0], 0, key if key >= 0 else argument)
    if name < 0 or key < 0:
        return Probe("", "", one, None, ending)  # unlike any format: no parser finds the call
    start = _mark_start(one, min(start, name))
    head = one[start:name]
    for close in closes:
        head = head.rpartition(close)[2]
    begun = two.find(head + NAMES[0]) if two is not None else -1
    after = len(head) + len(NAMES[0])
    second = two[begun + after :] if two is not None and begun >= 0 else None
    if second is not None and NAMES[1] not in second:
        second = None
    return Probe(*blank_start(head), one[name + len(NAMES[0]) :], second, ending)


def written_reasoning(render: Render) -> str:
    """What a template writes for reasoning, and in front of a response."""
    message = {"role": "assistant", "content": _ANSWER, "reasoning_content": "Probe thought."}
    return f"{render([_USER, message], False) or ''}{render([_USER], True) or ''}"


def _calling(count: int) -> dict[str, Any]:
    calls = [
        {
            "id": f"Probe000{number}",
            "type": "function",
            "function": {"name": name, "arguments": ARGUMENTS},
        }
        for number, name in enumerate(NAMES[:count])
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _common_length(left: str, right: str) -> int:
    """Number of first characters that two texts have in common."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))


def _mark_start(text: str, start: int) -> int:
    """The start of the mark that a position is within, or the position."""
    for opening, close in (("<", ">"), ("[", "]")):
        begin = text.rfind(opening, max(start - LONGEST_MARK, 0), start)
        if begin >= 0 and close not in text[begin:start] and "\n" not in text[begin:start]:
            return begin
    return start


def tokens_of(text: str) -> list[str]:
    """Marks, words and white space."""
    return _TOKEN.findall(text)


def common_suffix(left: str, right: str) -> str:
    """The last tokens that two texts have in common."""
    found: list[str] = []
    for one, other in zip(reversed(tokens_of(left)), reversed(tokens_of(right)), strict=False):
        if one != other:
            break
        found.append(one)
    return "".join(reversed(found))


def common_prefix(left: str, right: str) -> str:
    """The first tokens that two texts have in common."""
    found: list[str] = []
    for one, other in zip(tokens_of(left), tokens_of(right), strict=False):
        if one != other:
            break
        found.append(one)
    return "".join(found)


def blank_end(text: str) -> tuple[str, str]:
    """A text without white space at its end, and the white space."""
    stripped = text.rstrip()
    return stripped, text[len(stripped) :]


def blank_start(text: str) -> tuple[str, str]:
    """The white space that a text begins with, and the rest."""
    stripped = text.lstrip()
    return text[: len(text) - len(stripped)], stripped
