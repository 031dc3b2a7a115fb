"""How a model's answers are read: its response template, or the formats that it is seen to use."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tgi_cli.errors import ConfigError
from tgi_cli.text.known_formats import (
    ANY_START,
    FALLBACK,
    PARSERS,
    REASONING_FIELDS,
    REASONING_FORMATS,
    TOOL_FORMATS,
    ToolFormat,
    compose,
    detect,
)
from tgi_cli.text.response_parser import ResponseParser, ResponseTemplates
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.text.tool_calls import shape_of

logger = logging.getLogger(__name__)

_START_KEYS = ("start_anchor", "start_anchor_pattern")


@dataclass(frozen=True, slots=True)
class AnswerMarkers:
    """The texts around reasoning and in front of the content; empty: none.

    They let a grammar constrain the content alone, behind any reasoning.
    """

    open: str = ""
    close: str = ""
    then: str = ""

    @classmethod
    def of(cls, template: Mapping[str, Any]) -> AnswerMarkers:
        """Those markers of a response template that are fixed texts."""
        fields = template["fields"]
        then = _first_text(fields.get("content", {}), "open")
        # Where even the content is marked, a turn of its own follows the reasoning's.
        turn = template.get("start_anchor", "") if then else ""
        for name in REASONING_FIELDS:
            region = fields.get(name, {})
            opening, close = _first_text(region, "open"), _first_text(region, "close")
            if opening and close:
                return cls(opening, close + turn, then)
        return cls(then=then)

    def before(self, inside: bool) -> dict[str, Any] | None:
        """The argument of :meth:`~tgi_cli.text.grammar.grammar.Grammar.behind`.

        None if there is nothing but content.

        Args:
            inside: generation starts within reasoning.
        """
        if not self.open and not self.then:
            return None
        return {"open": self.open, "close": self.close, "then": self.then, "inside": inside}


class ResponseFormat:
    """How one model's answers are read; built once.

    Raises ValueError for a model's own response template that is none.

    Attributes:
        tools: how calls are written; None: by the model's own template, or not at all.
        knows_tools, knows_reasoning: whether calls or reasoning can be told from text.
        tools_as_text: the chat template does not know tools, so they are told in a message.
        markers: texts around reasoning and in front of the content.
    """

    def __init__(
        self,
        template: Mapping[str, Any],
        tokenizer: Tokenizer,
        tools: ToolFormat | None = None,
        tools_as_text: bool = False,
    ) -> None:
        fields: dict[str, Any] = dict(template["fields"])
        self.markers = AnswerMarkers.of(template)
        self.tools = tools
        self.tools_as_text = tools_as_text
        self.knows_tools = "tool_calls" in fields
        self.knows_reasoning = any(name in fields for name in REASONING_FIELDS)
        plain = {name: field for name, field in fields.items() if name != "tool_calls"}
        self._marked = any("open" in field or "open_pattern" in field for field in plain.values())
        self._template = template
        self._fields, self._plain = fields, plain
        self._anchored = template.get("start_anchor_pattern") != ANY_START
        self._openings = [
            text
            for name in REASONING_FIELDS
            for text in _texts(fields.get(name, {}).get("open", []))
        ]
        self._shown = _shown(tokenizer, list(fields.values()))
        self._shown_plain = _shown(tokenizer, list(plain.values()))
        if tools is None or self._marked:
            self.load()

    @cached_property
    def templates(self) -> ResponseTemplates:
        """The template as transformers has it; takes half a second and 26 MB the first time."""
        from transformers.utils.chat_parsing.response_templates import load_response_template

        every = load_response_template(_neutral(self._template, self._fields))
        without_tools = whole = shape = None
        if self._marked:
            without_tools = load_response_template(_neutral(self._template, self._plain))
        if self.knows_tools:
            call = {**self._fields["tool_calls"], "optional": True}
            whole = load_response_template(
                {"fields": {"tool_calls": call}, "start_anchor_pattern": ANY_START}
            )
            shape = shape_of(whole.fields["tool_calls"])
        return ResponseTemplates(every, without_tools, whole, shape)

    @property
    def loaded(self) -> bool:
        """Whether :meth:`parser` need not load anything any more."""
        return "templates" in vars(self)

    def load(self) -> None:
        """Load what reads answers.

        Where only calls are marked, that waits for the first request with tools: many servers
        never see one.
        """
        _ = self.templates

    def shown(self, tools: bool) -> frozenset[int]:
        """Special tokens that have to be in the text, for regions to be told by them."""
        return self._shown if tools else self._shown_plain

    def parser(
        self,
        prompt: str,
        continued: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        parallel: bool = True,
    ) -> ResponseParser | None:
        """For one answer to ``prompt``; None where nothing in it could be marked.

        ``continued`` is what of the prompt the answer goes on from; ``tools`` those that may be
        called, of whose calls only the first counts unless they may be ``parallel``.
        """
        if not tools and not self._marked:
            return None
        prefix = self._prefix(prompt, continued)
        return ResponseParser(self.templates, self.tools, prefix, tools, parallel)

    def is_reasoning(self, prompt: str, continued: str = "") -> bool:
        """Whether an answer to ``prompt`` begins within reasoning."""
        prefix = self._prefix(prompt, continued)
        opened = prefix.rfind(self.markers.open) if self.markers.open else -1
        return opened >= 0 and self.markers.close not in prefix[opened:]

    def _prefix(self, prompt: str, continued: str) -> str:
        """What of the prompt belongs to the answer: templates open the reasoning themselves."""
        if self._anchored:
            starts = [
                match.end() for match in self.templates.every.start_anchor_re.finditer(prompt)
            ]
            return prompt[starts[-1] :] if starts else ""
        if continued:
            return continued
        end = prompt.rstrip()
        for opening in self._openings:
            if end.endswith(opening):
                return prompt[len(end) - len(opening) :]
        return ""


def choose_response_format(
    tokenizer: Tokenizer,
    template_text: str,
    takes_tools: bool,
    own: Any = None,
    tool_parser: str = "auto",
    reasoning_parser: str = "auto",
) -> ResponseFormat | None:
    """How a model's answers are read; None where nothing in them is marked.

    A model's ``own`` response template counts where both parsers are left open; else what is
    named, or what the chat template and the vocabulary give away. Raises ConfigError for a
    parser that is none.
    """
    _known("tool-call-parser", tool_parser, TOOL_FORMATS)
    _known("reasoning-parser", reasoning_parser, REASONING_FORMATS)
    if own is not None and tool_parser == reasoning_parser == "auto":
        try:
            return ResponseFormat(own, tokenizer)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("the model's response template is not used: %s", error)

    def has(text: str) -> bool:
        return text in template_text or tokenizer.backend.token_to_id(text) is not None

    tools: str | None = tool_parser
    if tool_parser == "auto":
        seen = detect(TOOL_FORMATS, template_text.__contains__) or detect(TOOL_FORMATS, has)
        tools = seen if takes_tools else FALLBACK
    elif tool_parser == "none":
        tools = None
    reasoning: str | None = reasoning_parser
    if reasoning_parser == "auto":
        reasoning = detect(REASONING_FORMATS, has)
    elif reasoning_parser == "none":
        reasoning = None
    template = compose(tools, reasoning)
    if template is None:
        return None
    return ResponseFormat(
        template, tokenizer, TOOL_FORMATS[tools] if tools else None, not takes_tools
    )


def _known(flag: str, name: str, formats: Mapping[str, Any]) -> None:
    if name not in formats and name not in PARSERS:
        known = ", ".join((*PARSERS, *sorted(formats)))
        raise ConfigError(f"--{flag} {name!r} is not known", f"one of: {known}")


def _neutral(template: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The template with nothing but regions: their text as it is, which cannot fail."""
    markers = ("open", "open_pattern", "close", "close_pattern", "repeats")
    plain = {"content": "text", "content_args": {"strip": False}, "transform": {}}
    start = {key: template[key] for key in _START_KEYS if key in template}
    return {
        **start,
        "fields": {
            name: {**{key: field[key] for key in markers if key in field}, **plain}
            for name, field in fields.items()
        },
    }


def _first_text(region: Mapping[str, Any], key: str) -> str:
    """The first marker of a region, or an empty text if it is a pattern."""
    found = region.get(key, "")
    if isinstance(found, list | tuple):
        found = found[0] if found else ""
    return found if isinstance(found, str) else ""


def _texts(value: Any) -> Iterator[str]:
    """Every string within."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)


def _shown(tokenizer: Tokenizer, fields: Sequence[Any]) -> frozenset[int]:
    """Special tokens that are part of a marker."""
    markers = ("open", "open_pattern", "close", "close_pattern")
    known = [text for field in fields for key in markers for text in _texts(field.get(key, []))]
    found = set()
    for index in tokenizer.special_ids:
        token = tokenizer.backend.id_to_token(index) or ""
        if token and any(token in text or re.escape(token) in text for text in known):
            found.add(index)
    return frozenset(found)
