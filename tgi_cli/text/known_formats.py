"""Known formats of reasoning and tool calls, and how to detect which one a model uses.

Each entry is a field of a response template, transformers' description of a model's responses
(https://huggingface.co/docs/transformers/main/chat_response_parsing): what opens a region, what
closes it, and how its content becomes a part of the message. Models with a ``response_template``
in their tokenizer_config.json need none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Field = Mapping[str, Any]

ANY_START = r"\A"
"""Start pattern of templates that do not define where a model's turns begin."""


REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names of the reasoning region in response templates."""


@dataclass(frozen=True, slots=True)
class ToolCallGrammar:
    """The texts around the arguments of tool calls; ``NAME`` is replaced by the function's name.

    Attributes:
        trigger: Text that begins like this is a call. If empty, only a forced single call can be
            constrained.
        begin: Text in front of one call's arguments.
        end: Text behind one call's arguments.
        between: Text between two calls of one response.
        first: Text in front of all calls.
        last: Text behind all calls.
    """

    trigger: str
    begin: str
    end: str
    between: str = "\n"
    first: str = ""
    last: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls.

    Attributes:
        region: Field of a response template.
        marks: Groups of texts. A model that has all texts of a group, in its chat template or as
            tokens, uses the format.
        bare: No marker distinguishes a call from similar text, so only names of the request's
            tools count.
        id_length: Number of letters and digits in a call's id; 0 for OpenAI's form.
        grammar: Texts around the arguments, or None if the arguments are not JSON, or nothing
            marks the beginning of a call.
    """

    region: Field
    marks: tuple[tuple[str, ...], ...]
    bare: bool = False
    id_length: int = 0
    grammar: ToolCallGrammar | None = None


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A format of reasoning.

    Attributes:
        region: Field of a response template, of the reasoning.
        marks: As in :class:`ToolFormat`.
        content: Field of the content, if it is marked, too.
        start: Text of the prompt that the response follows, or None if unknown.
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
"""Tool formats by the names of ``--tool-call-parser``; the first that fits is used.

Repetitions in opening and closing patterns are bounded: as long as a pattern may still match, its
text is searched again with every token.
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
"""Reasoning formats by the names of ``--reasoning-parser``; the first that fits is used."""

PARSERS = ("auto", "none")
"""Further values of both flags."""

FALLBACK = "hermes"
"""Format that models are prompted for if their chat template does not support tools."""


def detect(formats: Mapping[str, Any], has: Callable[[str], bool]) -> str | None:
    """The first format whose marks a model has, or None."""
    for name, form in formats.items():
        if any(all(map(has, group)) for group in form.marks):
            return name
    return None


def compose(tools: str | None, reasoning: str | None) -> dict[str, Any] | None:
    """The response template of two formats together, or None if nothing is marked."""
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
