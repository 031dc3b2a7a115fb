"""How the responses of a model are parsed: by its own response template, or by known formats."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from tgi_cli.errors import ConfigError
from tgi_cli.text.formats.detect import ANY_START, FALLBACK, PARSERS, compose, detect
from tgi_cli.text.formats.inference import infer_tool_format
from tgi_cli.text.formats.json_calls import shape_of
from tgi_cli.text.formats.probe import Render, probe_calls, written_reasoning
from tgi_cli.text.formats.reasoning import REASONING_FIELDS, REASONING_FORMATS
from tgi_cli.text.formats.syntax import ToolFormat
from tgi_cli.text.formats.tools import TOOL_FORMATS
from tgi_cli.text.reasoning import AnswerMarkers
from tgi_cli.text.response_parser import ResponseParser, ResponseTemplates
from tgi_cli.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_START_KEYS = ("start_anchor", "start_anchor_pattern")
_MARKERS = ("open", "open_pattern", "close", "close_pattern")


class ResponseFormat:
    """How the responses of one model are parsed; built once.

    Attributes:
        tools: Format of tool calls, or None if the model's own template defines it, or nothing.
        knows_tools: Whether tool calls can be distinguished from text.
        knows_reasoning: Whether reasoning can be distinguished from text.
        tools_as_text: The chat template does not support tools, so a message describes them.
        markers: Texts around reasoning and in front of the content.

    Raises:
        ValueError: The model's own response template is invalid.
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
        """The template as transformers loads it; takes 0.5 s and 26 MB the first time."""
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
        """Whether :meth:`load` has run."""
        return "templates" in vars(self)

    def load(self) -> None:
        """Load the templates.

        If only tool calls have markers, that waits for the first request with tools: many
        servers never get one.
        """
        _ = self.templates

    def shown(self, tools: bool) -> frozenset[int]:
        """Special tokens that the text must contain, because they mark regions."""
        return self._shown if tools else self._shown_plain

    def parser(
        self,
        prompt: str,
        continued: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        parallel: bool = True,
    ) -> ResponseParser | None:
        """A parser for one response to ``prompt``, or None if nothing in it can be marked.

        Args:
            continued: End of the prompt that the response continues.
            tools: Tools that may be called.
            parallel: Whether to return more than the first tool call.
        """
        if not tools and not self._marked:
            return None
        prefix = self._prefix(prompt, continued)
        return ResponseParser(self.templates, self.tools, prefix, tools, parallel)

    def is_reasoning(self, prompt: str, continued: str = "") -> bool:
        """Whether a response to ``prompt`` begins within reasoning."""
        return self.markers.is_open(self._prefix(prompt, continued))

    def _prefix(self, prompt: str, continued: str) -> str:
        """The end of the prompt that belongs to the response: templates may open the reasoning."""
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
    render: Render | None = None,
) -> ResponseFormat | None:
    """How the responses of a model are parsed, or None if nothing in them is marked.

    Args:
        template_text: Source of the chat template.
        takes_tools: Whether the chat template supports tools.
        own: The model's own response template; used if both parsers are ``auto``.
        tool_parser: ``none``, a format, or ``auto``: detect it in template and vocabulary.
        reasoning_parser: ``none``, a format, or ``auto``.
        render: Renders messages with the chat template and some tools. Formats of calls are
            checked against what it writes, and inferred from that if none fits.

    Raises:
        ConfigError: There is no such parser.
    """
    for flag, name, formats in (
        ("tool-call-parser", tool_parser, TOOL_FORMATS),
        ("reasoning-parser", reasoning_parser, REASONING_FORMATS),
    ):
        if name not in formats and name not in PARSERS:
            known = ", ".join((*PARSERS, *sorted(formats)))
            raise ConfigError(f"--{flag} {name!r} is unknown", f"one of: {known}")
    if own is not None and tool_parser == reasoning_parser == "auto":
        try:
            return ResponseFormat(own, tokenizer)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("the model's response template is not used: %s", error)

    def has(text: str) -> bool:
        return text in template_text or tokenizer.backend.token_to_id(text) is not None

    tools = TOOL_FORMATS.get(tool_parser)
    if tool_parser == "auto" and not takes_tools:
        tools = TOOL_FORMATS[FALLBACK]
    elif tool_parser == "auto":
        tools = _tool_format(template_text, has, render)
    reasoning = REASONING_FORMATS.get(reasoning_parser)
    if reasoning_parser == "auto":
        thought = written_reasoning(render) if render is not None else ""
        found = detect(REASONING_FORMATS, lambda text: has(text) or text in thought)
        reasoning = REASONING_FORMATS[found] if found else None
    template = compose(tools, reasoning)
    if template is None:
        return None
    return ResponseFormat(template, tokenizer, tools, not takes_tools)


def _tool_format(
    template_text: str, has: Callable[[str], bool], render: Render | None
) -> ToolFormat | None:
    """The known format whose marks a model has, or else the one that its template writes."""
    closes = [
        text
        for known in REASONING_FORMATS.values()
        for text in _texts(known.region["close"])
        if "think" in text.lower()
    ]
    probe = probe_calls(render, closes) if render is not None else None
    written = probe.text if probe is not None else ""

    def shown(text: str) -> bool:
        return text in template_text or text in written

    for test in (shown, has):
        name = detect(TOOL_FORMATS, test)
        if name is not None and (probe is None or probe.is_read(TOOL_FORMATS[name])):
            return TOOL_FORMATS[name]
    if probe is None:
        return None
    inferred = infer_tool_format(probe)
    if inferred is not None and probe.is_read(inferred):
        logger.info("inferred the format of tool calls from the chat template")
        return inferred
    logger.warning(
        "tools are refused: the chat template's calls are in an unknown format "
        "(--tool-call-parser sets one)"
    )
    return None


def _neutral(template: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The template with its regions alone; their text stays as it is, which cannot fail."""
    plain = {"content": "text", "content_args": {"strip": False}, "transform": {}}
    start = {key: template[key] for key in _START_KEYS if key in template}
    return {
        **start,
        "fields": {
            name: {**{key: field[key] for key in (*_MARKERS, "repeats") if key in field}, **plain}
            for name, field in fields.items()
        },
    }


def _texts(value: Any) -> Iterator[str]:
    """Every string in a JSON value."""
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
    known = [text for field in fields for key in _MARKERS for text in _texts(field.get(key, []))]
    found = set()
    for index in tokenizer.special_ids:
        token = tokenizer.backend.id_to_token(index) or ""
        if token and any(token in text or re.escape(token) in text for text in known):
            found.add(index)
    return frozenset(found)
