"""Formats whose arguments are tagged values or literals, as models' chat templates write them."""

from __future__ import annotations

from typing import Any

from tgi_cli.text.formats.syntax import (
    LiteralSyntax,
    TagSyntax,
    ToolCallGrammar,
    ToolFormat,
    delimited,
)

_OTHERS = ("integer", "number", "boolean", "object", "array", "null")

_FUNCTION_TAGS = TagSyntax(
    "<function=", ">", "<parameter=", ">", "</parameter>", "</function>", gap="\n"
)
_LINES: dict[str, Any] = {"before": "\n", "after": "\n", "between": "\n"}
"""Each call, and each marker around calls, has lines of its own."""


def _dsml(name: str) -> ToolFormat:
    """DeepSeek's markup, whose tags distinguish strings from other values."""
    mark = "｜DSML｜"
    return delimited(
        TagSyntax(
            f'<{mark}invoke name="',
            '">',
            f'<{mark}parameter name="',
            '" string="TYPE">',
            f"</{mark}parameter>",
            f"</{mark}invoke>",
            gap="\n",
            types=(("string", "true"), *((other, "false") for other in _OTHERS)),
        ),
        f"<{mark}{name}>",
        f"</{mark}{name}>",
        ((f"<{mark}{name}>",), (f"{mark}", f"{name}>")),
        **_LINES,
        inside=True,
    )


MARKUP_FORMATS: dict[str, ToolFormat] = {
    "kimi_k3": delimited(
        TagSyntax(
            '<|open|>call tool="',
            '" index="INDEX"<|sep|>',
            '<|open|>argument key="',
            '" type="TYPE"<|sep|>',
            "<|close|>argument<|sep|>",
            "<|close|>call<|sep|>",
            types=(("string", "string"), ("integer", "number"), *((t, t) for t in _OTHERS[1:])),
        ),
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
        (("<|open|>", "<|close|>", "<|sep|>"),),
        inside=True,
    ),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v32": _dsml("function_calls"),
    "step3": delimited(
        TagSyntax(
            '<steptml:invoke name="',
            '">',
            '<steptml:parameter name="',
            '">',
            "</steptml:parameter>",
            "</steptml:invoke>",
        ),
        "<｜tool_calls_begin｜>",
        "<｜tool_calls_end｜>",
        (("<｜tool_calls_begin｜>", "steptml:"),),
        inside=True,
        before="<｜tool_call_begin｜>function<｜tool_sep｜>",
        after="<｜tool_call_end｜>",
        between="<｜tool_call_end｜><｜tool_call_begin｜>function<｜tool_sep｜>",
    ),
    "minimax_m2": delimited(
        TagSyntax(
            '<invoke name="',
            '">',
            '<parameter name="',
            '">',
            "</parameter>",
            "</invoke>",
            gap="\n",
        ),
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        (("<minimax:tool_call>",), ("minimax:tool_call",)),
        inside=True,
        **_LINES,
    ),
    "seed_oss": delimited(
        _FUNCTION_TAGS,
        "<seed:tool_call>",
        "</seed:tool_call>",
        (("<seed:tool_call>",), ("seed:tool_call",)),
        **_LINES,
    ),
    "hunyuan_v3": delimited(
        TagSyntax(
            "<tool_call:opensource>",
            "<tool_sep:opensource>",
            "<arg_key:opensource>",
            "</arg_key:opensource>\n<arg_value:opensource>",
            "</arg_value:opensource>",
            "</tool_call:opensource>",
            gap="\n",
        ),
        "<tool_calls:opensource>",
        "</tool_calls:opensource>",
        (("<tool_calls:opensource>",),),
        inside=True,
        **_LINES,
    ),
    "longcat_v2": delimited(
        TagSyntax(
            "",
            "",
            "<longcat_arg_key>",
            "</longcat_arg_key><longcat_arg_value>",
            "</longcat_arg_value>",
        ),
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        (("<longcat_tool_call>", "<longcat_arg_key>"),),
        between="\n",
    ),
    "gemma4": delimited(
        LiteralSyntax("call:", "{", ":", "}", quotes='<|"|>'),
        "<|tool_call>",
        "<tool_call|>",
        (("<|tool_call>", "<tool_call|>"),),
    ),
    "functiongemma": delimited(
        LiteralSyntax("call:", "{", ":", "}", quotes="<escape>"),
        "<start_function_call>",
        "<end_function_call>",
        (("<start_function_call>",),),
    ),
    "olmo3": delimited(
        LiteralSyntax("", "(", "=", ")"),
        "<function_calls>",
        "</function_calls>",
        (("<function_calls>", "</function_calls>"),),
        inside=True,
        **_LINES,
    ),
    "lfm2": delimited(
        LiteralSyntax("", "(", "=", ")", python=True),
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        (("<|tool_call_start|>", "<|tool_call_end|>"),),
        inside=True,
        before="[",
        after="]",
        between=", ",
    ),
    "apertus": ToolFormat(
        {"repeats": True, "open": "<|tools_prefix|>", "close": "<|tools_suffix|>"},
        (("<|tools_prefix|>", "<|tools_suffix|>"),),
        grammar=ToolCallGrammar(
            "<|tools_prefix|>",
            '{"NAME": ',
            "}",
            ", ",
            "<|tools_prefix|>[",
            "]<|tools_suffix|>",
        ),
        syntax=LiteralSyntax('{"', '": {', ":", "}", json=True),
    ),
    "qwen3_coder": delimited(
        TagSyntax(
            "<function=",
            ">",
            "<parameter=",
            ">",
            "</parameter>",
            "</function>",
            gap="\n",
            pad="\n",
        ),
        "<tool_call>",
        "</tool_call>",
        (("<tool_call>", "<function="),),
        **_LINES,
    ),
    "minicpm5": ToolFormat(
        {
            "repeats": True,
            "open_pattern": r'(?=<function name="[^"\n]{1,256}">)',
            "close": "</function>",
        },
        (('<function name="', "<param name="),),
        grammar=ToolCallGrammar(
            '<function name="', '<function name="NAME">', "</function>", between="\n"
        ),
        syntax=TagSyntax('<function name="', '">', '<param name="', '">', "</param>", cdata=True),
    ),
    "glm47": delimited(
        TagSyntax("", "", "<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
        "<tool_call>",
        "</tool_call>",
        (("<tool_call>", "</arg_key><arg_value>"),),
    ),
    "glm45": delimited(
        TagSyntax("", "", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", gap="\n"),
        "<tool_call>",
        "</tool_call>",
        (("<tool_call>", "<arg_key>"),),
        between="\n",
    ),
    "pythonic": ToolFormat(
        {
            "repeats": True,
            "open_pattern": r"\A\s{0,64}(?:<\|python_start\|>\s{0,64})?"
            r"(?=\[\s{0,64}[A-Za-z_][\w.-]{0,255}\()",
        },
        (("[func_name1(",),),
        bare=True,
        grammar=ToolCallGrammar("", "NAME(", ")", ", ", "[", "]"),
        syntax=LiteralSyntax("", "(", "=", ")", python=True),
    ),
}
"""The formats by name; the first that fits is used."""
