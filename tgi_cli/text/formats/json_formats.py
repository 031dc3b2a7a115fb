"""Formats whose arguments are JSON, as models' chat templates write them."""

from __future__ import annotations

from tgi_cli.text.formats.syntax import (
    ToolCallGrammar,
    ToolFormat,
    json_list,
    json_objects,
    maybe,
    named_json,
    region_of,
)


def _deepseek(marks: tuple[str, ...], begin: str, end: str, between: str) -> ToolFormat:
    """DeepSeek V3 and R1 write a Markdown block, V3.1 does not; either is accepted."""
    return ToolFormat(
        region_of(
            "json",
            "{name}",
            "{content}",
            open_pattern=r"(?:<｜tool▁calls▁begin｜>\s{0,64})?<｜tool▁call▁begin｜>"
            r"(?:function<｜tool▁sep｜>(?P<name>[^<\n]{1,256})\n```json\n|"
            r"(?!function<｜tool▁sep｜>)(?P<name>[^<\n]{1,256})<｜tool▁sep｜>)",
            close_pattern=r"(?:\s{0,64}```)?<｜tool▁call▁end｜>" + maybe("<｜tool▁calls▁end｜>"),
        ),
        (marks,),
        grammar=ToolCallGrammar(
            "<｜tool▁calls▁begin｜>",
            begin,
            end,
            between,
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ),
    )


JSON_FORMATS: dict[str, ToolFormat] = {
    "harmony": ToolFormat(
        region_of(
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
    "kimi_k2": ToolFormat(
        region_of(
            "json",
            "{name}",
            "{content}",
            open_pattern=r"(?:<\|tool_calls_section_begin\|>\s{0,64})?<\|tool_call_begin\|>\s{0,64}"
            r"(?P<id>(?:functions\.)?(?P<name>[\w.-]{1,256}?)(?::\d{1,8})?)\s{0,64}"
            r"<\|tool_call_argument_begin\|>",
            close_pattern=r"<\|tool_call_end\|>" + maybe("<|tool_calls_section_end|>"),
        ),
        (("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),),
        grammar=ToolCallGrammar(
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            between="",
            first="<|tool_calls_section_begin|>",
            last="<|tool_calls_section_end|>",
        ),
    ),
    "longcat": json_objects(
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        (("<longcat_tool_call>",),),
        before="\n",
        after="\n",
    ),
    "cohere": json_list(
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        (("<|START_ACTION|>",),),
        keys=("tool_name", "parameters"),
        begin='{"tool_call_id": "INDEX", "tool_name": "NAME", "parameters": ',
        before="[\n    ",
        after="\n",
        between=",\n    ",
    ),
    "nemotron": json_list("<TOOLCALL>", "</TOOLCALL>", (("<TOOLCALL>",),)),
    "functionary": named_json(
        "<function=", ">", "</function>", (("<function=", "</function>", "<|eom_id|>"),)
    ),
    "hermes": json_objects(
        "<tool_call>", "</tool_call>", (("<tool_call>",),), before="\n", after="\n"
    ),
    "mistral": ToolFormat(
        region_of(
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
    "mistral_list": json_list("[TOOL_CALLS]", "", (("[TOOL_CALLS]",),), before=" [", id_length=9),
    "deepseek": _deepseek(
        ("<｜tool▁call▁begin｜>", "```json"),
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "\n",
    ),
    "deepseek_v31": _deepseek(
        ("<｜tool▁call▁begin｜>",),
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "",
    ),
    "solar": named_json(
        "<|tool_call:begin|>INDEX<|tool_call:name|>",
        "<|tool_call:args|>",
        "<|tool_call:end|>",
        (("<|tool_call:begin|>",),),
        first="<|tool_calls|>",
        last="<|calls|>",
    ),
    "phi4_mini": json_list(
        "<|tool_call|>", "<|/tool_call|>", (("<|tool_call|>", "<|/tool_call|>"),)
    ),
    "functools": json_list("functools", "", (("functools[",),)),
    "granite": json_list("<|tool_call|>", "", (("<|tool_call|>",),)),
    "granite_20b": json_objects(
        "<function_call>", "", (("<function_call>",),), before=" ", between="\n"
    ),
    "internlm": json_objects(
        "<|action_start|><|plugin|>",
        "<|action_end|>",
        (("<|action_start|>", "<|plugin|>"),),
        keys=("name", "parameters"),
        before="\n",
    ),
    "gigachat3": json_objects(
        "function call<|role_sep|>", "", (("function call<|role_sep|>",),), before="\n"
    ),
    "gigachat31": json_objects("<|function_call|>", "", (("<|function_call|>",),)),
    "jamba": json_list(
        "<tool_calls>", "</tool_calls>", (("<tool_calls>[",), ("'<tool_calls>' + ",))
    ),
    "minimax": json_objects(
        "<tool_calls>",
        "</tool_calls>",
        (("<tool_calls>",),),
        before="\n",
        after="\n",
        inside=True,
    ),
    "llama3_json": ToolFormat(
        region_of(
            "json",
            "{content.name}",
            "{content.parameters}",
            open_pattern=r"\A\s{0,64}(?:<\|python_tag\|>\s{0,64}|<\|python_start\|>\s{0,64}"
            r"(?:<\|python_end\|>\s{0,64})?)?"
            r'(?=\{\s{0,64}"(?:type"\s{0,8}:\s{0,8}"function"\s{0,8},\s{0,64}")?name"\s{0,8}:)',
        ),
        (("<|python_tag|>", '"parameters"'), ("<|python_start|>", '"parameters"')),
        bare=True,
        grammar=ToolCallGrammar("", '{"name": "NAME", "parameters": ', "}", single=True),
    ),
    "xlam": ToolFormat(
        region_of(
            "json",
            "{name}",
            "{arguments}",
            open_pattern=r"\A\s{0,64}(?:```(?:json)?\s{0,64})?"
            r'(?=\[\s{0,64}\{\s{0,64}"name"\s{0,8}:)',
            transform_each=True,
        ),
        bare=True,
        grammar=ToolCallGrammar("", '{"name": "NAME", "arguments": ', "}", ", ", "[", "]"),
    ),
}
"""The formats by name; the first that fits is used.

Repetitions in opening and closing patterns are bounded: as long as a pattern may still match, its
text is searched again with every token.
"""
