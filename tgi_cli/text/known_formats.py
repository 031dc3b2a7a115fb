"""How models write reasoning and tool calls: data, and how to tell which a model uses.

Each entry is a field of a response template, transformers' description of what a model writes
(https://huggingface.co/docs/transformers/main/chat_response_parsing): what opens it, what closes
it, and how its content becomes a part of the message. A model whose tokenizer_config.json has a
``response_template`` of its own needs none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Field = Mapping[str, Any]

ANY_START = r"\A"
"""Of templates that do not know how a model's turns begin: response.py cuts them out before."""


REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names of the reasoning region in response templates."""


@dataclass(frozen=True, slots=True)
class ToolCallGrammar:
    """What stands around the arguments of calls, to be constrained by; ``NAME`` is the function's.

    Attributes:
        trigger: a text that begins with it is a call; empty: only one that must be, and alone.
        begin, end: around one call's arguments.
        between: two calls of one answer.
        first, last: around all of them.
    """

    trigger: str
    begin: str
    end: str
    between: str = "\n"
    first: str = ""
    last: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written.

    Attributes:
        region: the field of a response template.
        marks: groups of texts; a model that has all of one group, in its chat template or as
            tokens, writes calls so.
        bare: no marker tells a call from text that looks alike, so only names of the request's
            tools count.
        id_length: of the letters and digits of a call's id; 0: OpenAI's form.
        grammar: None: arguments are no JSON, or nothing marks where a call may begin.
    """

    region: Field
    marks: tuple[tuple[str, ...], ...]
    bare: bool = False
    id_length: int = 0
    grammar: ToolCallGrammar | None = None


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How reasoning is told from the answer; fields of a response template.

    Attributes:
        region: the reasoning.
        content: of the answer itself, where even that is marked.
        start: what the answer begins behind, in the prompt; None: that is not known.
        marks: as :class:`ToolFormat`.
    """

    region: Field
    marks: tuple[tuple[str, ...], ...]
    content: Field = field(default_factory=dict)
    start: str | None = None


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _field(content: str, name: str, arguments: str, **keys: Any) -> Field:
    return {"repeats": True, "content": content, "transform": _call(name, arguments), **keys}


TOOL_FORMATS: dict[str, ToolFormat] = {
    "harmony": ToolFormat(
        _field(
            "json",
            "{name}",
            "{content}",
            open_pattern=r"(?:<\|channel\|>(?:commentary|analysis) to=(?:functions\.)?"
            r"(?P<name>[\w.-]{1,256}?)(?:\s{0,64}<\|constrain\|>\w{1,64}|\s{1,64}\w{1,64})?|"
            r" to=(?:functions\.)?(?P<name>[\w.-]{1,256}?)<\|channel\|>(?:commentary|analysis)"
            r"(?:\s{0,64}<\|constrain\|>\w{1,64}|\s{1,64}\w{1,64})?)<\|message\|>",
            close=["<|call|>", "<|end|>"],
        ),
        (("<|channel|>", "<|message|>"),),
        grammar=ToolCallGrammar(
            " to=functions.",
            " to=functions.NAME<|channel|>commentary json<|message|>",
            "<|call|>",
            between="<|start|>assistant",
        ),
    ),
    "qwen3_coder": ToolFormat(
        _field(
            "xml-inline",
            "{name}",
            "{content}",
            open_pattern=r"<tool_call>\s{0,64}<function=(?P<name>[^>\s]{1,256})>",
            close_pattern=r"</function>\s{0,64}</tool_call>",
            content_args={
                "tag_pattern": r"<parameter=(?P<key>[^>\s]{1,256})>\n?(?P<value>.*?)\n?</parameter>"
            },
        ),
        (("<tool_call>", "<function="),),
    ),
    "glm45": ToolFormat(
        _field(
            "xml-inline",
            "{name}",
            "{content}",
            open_pattern=r"<tool_call>\s{0,64}(?P<name>[^<\s]{1,256})(?=[<\s])",
            close="</tool_call>",
            content_args={
                "tag_pattern": r"<arg_key>(?P<key>[^<]{0,256})</arg_key>\s{0,64}"
                r"<arg_value>(?P<value>.*?)</arg_value>"
            },
        ),
        (("<tool_call>", "<arg_key>"),),
    ),
    "hermes": ToolFormat(
        _field(
            "json",
            "{content.name}",
            "{content.arguments}",
            open="<tool_call>",
            close="</tool_call>",
        ),
        (("<tool_call>",),),
        grammar=ToolCallGrammar(
            "<tool_call>", '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"
        ),
    ),
    "mistral": ToolFormat(
        _field(
            "json",
            "{name}",
            "{content}",
            open_pattern=r"\[TOOL_CALLS\]\s{0,64}(?P<name>[^\s\[\]{}]{1,256})\s{0,64}"
            r"(?:\[CALL_ID\][^\[{]{0,64})?(?:\[ARGS\])?(?=\s{0,64}\{)",
            close_pattern=r"(?=\[TOOL_CALLS\])",
        ),
        (("[TOOL_CALLS]", "[ARGS]"),),
        id_length=9,
        grammar=ToolCallGrammar("[TOOL_CALLS]", "[TOOL_CALLS]NAME[ARGS]", "", between=""),
    ),
    "mistral_list": ToolFormat(
        _field(
            "json",
            "{name}",
            "{arguments}",
            open="[TOOL_CALLS]",
            transform_each=True,
        ),
        (("[TOOL_CALLS]",),),
        id_length=9,
        grammar=ToolCallGrammar(
            "[TOOL_CALLS]",
            '{"name": "NAME", "arguments": ',
            "}",
            between=", ",
            first="[TOOL_CALLS] [",
            last="]",
        ),
    ),
    "deepseek": ToolFormat(
        _field(
            "json",
            "{name}",
            "{content}",
            open_pattern=r"(?:<｜tool▁calls▁begin｜>\s{0,64})?<｜tool▁call▁begin｜>"
            r"(?:function<｜tool▁sep｜>(?P<name>[^<\n]{1,256})\n```json\n|"
            r"(?!function<｜tool▁sep｜>)(?P<name>[^<\n]{1,256})<｜tool▁sep｜>)",
            close_pattern=r"(?:\s{0,64}```)?<｜tool▁call▁end｜>(?:\s{0,64}<｜tool▁calls▁end｜>|"
            r"(?=\s{0,64}<｜tool▁call▁begin｜>)|\s{0,64}\Z|(?=\s{0,64}[^\s<]))",
        ),
        (("<｜tool▁call▁begin｜>",),),
    ),
    "llama3_json": ToolFormat(
        _field(
            "json",
            "{content.name}",
            "{content.parameters}",
            open_pattern=r"\A\s{0,64}(?:<\|python_tag\|>\s{0,64})?"
            r'(?=\{\s{0,64}"(?:type"\s{0,8}:\s{0,8}"function"\s{0,8},\s{0,64}")?name"\s{0,8}:)',
        ),
        (("<|python_tag|>", '"parameters"'),),
        bare=True,
        grammar=ToolCallGrammar("", '{"name": "NAME", "parameters": ', "}"),
    ),
}
"""By the names of ``--tool-call-parser``; of two that fit, the earlier is taken.

Repetitions in what opens or closes a region are bounded: as long as it may still match, all of it
is looked at again with every token.
"""

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "harmony": ReasoningFormat(
        {"open": "<|channel|>analysis<|message|>", "close": "<|end|>", "repeats": True},
        (("<|channel|>", "<|message|>"),),
        content={
            "open": ["<|channel|>final<|message|>", "<|channel|>commentary<|message|>"],
            "close": ["<|end|>", "<|return|>"],
            "repeats": True,
        },
        start="<|start|>assistant",
    ),
    "think": ReasoningFormat(
        {"open": "<think>", "close": "</think>"}, (("<think>",), ("</think>",))
    ),
    "mistral": ReasoningFormat(
        {"open": "[THINK]", "close": "[/THINK]"}, (("[THINK]", "[/THINK]"),)
    ),
    "seed_oss": ReasoningFormat(
        {"open": "<seed:think>", "close": "</seed:think>"}, (("<seed:think>",),)
    ),
}
"""By the names of ``--reasoning-parser``; of two that fit, the earlier is taken."""

PARSERS = ("auto", "none")
"""What both flags take besides: see for yourself, and leave all in the text."""

FALLBACK = "hermes"
"""What models are asked to write whose templates do not know tools."""


def detect(formats: Mapping[str, Any], has: Callable[[str], bool]) -> str | None:
    """The first format whose marks a model has; None if it has none's."""
    for name, form in formats.items():
        if any(all(map(has, group)) for group in form.marks):
            return name
    return None


def compose(tools: str | None, reasoning: str | None) -> dict[str, Any] | None:
    """The response template of both together; None where nothing is marked."""
    fields: dict[str, Any] = {"content": {}}
    start = None
    if reasoning is not None:
        form = REASONING_FORMATS[reasoning]
        fields["reasoning_content"] = dict(form.region)
        fields["content"] = dict(form.content)
        start = form.start
    if tools is not None:
        fields["tool_calls"] = dict(TOOL_FORMATS[tools].region)
    if len(fields) == 1:
        return None
    anchor = {"start_anchor": start} if start else {"start_anchor_pattern": ANY_START}
    return {**anchor, "fields": fields}
