"""The same two calls in every format of tool calls."""

from __future__ import annotations

import json

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
    for name in ("weather", "time")
]
PARIS, ROME = {"city": 'Paris {"}', "days": 3}, {"city": "Rom\\a"}
_P, _R = json.dumps(PARIS), json.dumps(ROME)


def _tags(call: str, argument: str, end: str, between: str = "") -> str:
    """Two calls; ``%n``, ``%k`` and ``%v`` stand for names, keys and values."""

    def one(name: str, arguments: dict[str, object]) -> str:
        written = "".join(
            argument.replace("%k", key)
            .replace("%v", str(value))
            .replace("%t", "string" if isinstance(value, str) else "number")
            .replace("%s", "true" if isinstance(value, str) else "false")
            for key, value in arguments.items()
        )
        return call.replace("%n", name) + written + end

    return one("weather", PARIS) + between + one("time", ROME)


_LIST = f'[{{"name": "weather", "arguments": {_P}}}, {{"name": "time", "arguments": {_R}}}]'
_LINES = f'{{"name": "weather", "arguments": {_P}}}\n{{"name": "time", "arguments": {_R}}}'
_PYTHON = 'weather(city=\'Paris {"}\', days=3)%time(city="Rom\\\\a")'
_GEMMA = 'call:weather{city:%Paris {"}%,days:3}|call:time{city:%Rom\\a%}'

TWO = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {_P}}}\n</tool_call>\n'
    f'<tool_call>{{"arguments": {_R}, "name": "time"}}</tool_call>',
    "mistral": f"[TOOL_CALLS]weather[ARGS]{_P}[TOOL_CALLS]time[CALL_ID]abc[ARGS]{_R}",
    "mistral_list": f"[TOOL_CALLS] {_LIST}",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    f"```json\n{_P}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>time<｜tool▁sep｜>{_R}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{_P}"
    f"<｜tool▁call▁end｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{_R}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": "<｜DSML｜function_calls>\n"
    + _tags(
        '<｜DSML｜invoke name="%n">\n',
        '<｜DSML｜parameter name="%k" string="%s">%v</｜DSML｜parameter>\n',
        "</｜DSML｜invoke>\n",
    )
    + "</｜DSML｜function_calls>",
    "deepseek_v4": "<｜DSML｜tool_calls>\n"
    + _tags(
        '<｜DSML｜invoke name="%n">\n',
        '<｜DSML｜parameter name="%k" string="%s">%v</｜DSML｜parameter>\n',
        "</｜DSML｜invoke>\n",
    )
    + "</｜DSML｜tool_calls>",
    "qwen3_coder": _tags(
        "<tool_call>\n<function=%n>\n",
        "<parameter=%k>\n%v\n</parameter>\n",
        "</function>\n</tool_call>",
        "\n",
    ),
    "seed_oss": _tags(
        "<seed:tool_call>\n<function=%n>\n",
        "<parameter=%k>%v</parameter>\n",
        "</function>\n</seed:tool_call>",
        "\n",
    ),
    "minimax_m2": "<minimax:tool_call>\n"
    + _tags('<invoke name="%n">\n', '<parameter name="%k">%v</parameter>\n', "</invoke>\n")
    + "</minimax:tool_call>",
    "minicpm5": _tags('<function name="%n">', '<param name="%k">%v</param>', "</function>", "\n"),
    "step3": "<｜tool_calls_begin｜>"
    + _tags(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="%n">',
        '<steptml:parameter name="%k">%v</steptml:parameter>',
        "</steptml:invoke><｜tool_call_end｜>",
        "\n",
    )
    + "<｜tool_calls_end｜>",
    "kimi_k3": "<|open|>tools<|sep|>"
    + _tags(
        '<|open|>call tool="%n" index="1"<|sep|>',
        '<|open|>argument key="%k" type="%t"<|sep|>%v<|close|>argument<|sep|>',
        "<|close|>call<|sep|>",
    )
    + "<|close|>tools<|sep|>",
    "hunyuan_v3": "<tool_calls:opensource>\n"
    + _tags(
        "<tool_call:opensource>%n<tool_sep:opensource>\n",
        "<arg_key:opensource>%k</arg_key:opensource>\n"
        "<arg_value:opensource>%v</arg_value:opensource>\n",
        "</tool_call:opensource>\n",
    )
    + "</tool_calls:opensource>",
    "glm45": _tags(
        "<tool_call>%n\n",
        "<arg_key>%k</arg_key>\n<arg_value>%v</arg_value>\n",
        "</tool_call>",
        "\n",
    ),
    "glm47": _tags(
        "<tool_call>%n", "<arg_key>%k</arg_key><arg_value>%v</arg_value>", "</tool_call>"
    ),
    "longcat_v2": _tags(
        "<longcat_tool_call>%n\n",
        "<longcat_arg_key>%k</longcat_arg_key>\n<longcat_arg_value>%v</longcat_arg_value>\n",
        "</longcat_tool_call>",
        "\n",
    ),
    "longcat": f'<longcat_tool_call>{{"name": "weather", "arguments": {_P}}}</longcat_tool_call>\n'
    f'<longcat_tool_call>\n{{"name": "time", "arguments": {_R}}}\n</longcat_tool_call>',
    "gemma4": "<|tool_call>"
    + _GEMMA.replace("%", '<|"|>').replace("|call:", "<tool_call|><|tool_call>call:")
    + "<tool_call|>",
    "functiongemma": "<start_function_call>"
    + _GEMMA.replace("%", "<escape>").replace(
        "|call:", "<end_function_call><start_function_call>call:"
    )
    + "<end_function_call>",
    "olmo3": f"<function_calls>\n{_PYTHON.replace('%', chr(10))}\n</function_calls>",
    "lfm2": f"<|tool_call_start|>[{_PYTHON.replace('%', ', ')}]<|tool_call_end|>",
    "pythonic": f"[{_PYTHON.replace('%', ', ')}]",
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
    f'{_P}}},\n    {{"tool_call_id": "1", "tool_name": "time", "parameters": {_R}}}\n]'
    "<|END_ACTION|>",
    "apertus": f'<|tools_prefix|>[{{"weather": {_P}}}, {{"time": {_R}}}]<|tools_suffix|>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{_P}<|tool_call_end|><|tool_call_begin|>functions.time:1"
    f"<|tool_call_argument_begin|>{_R}<|tool_call_end|><|tool_calls_section_end|>",
    "solar": "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>weather"
    f"<|tool_call:args|>{_P}<|tool_call:end|><|tool_call:begin|>f1b2c3d4e5<|tool_call:name|>time"
    f"<|tool_call:args|>{_R}<|tool_call:end|><|calls|>",
    "functionary": f"<function=weather>{_P}</function><function=time>{_R}</function>",
    "nemotron": f"<TOOLCALL>{_LIST}</TOOLCALL>",
    "jamba": f"<tool_calls>{_LIST}</tool_calls>",
    "minimax": f"<tool_calls>\n{_LINES}\n</tool_calls>",
    "phi4_mini": f"<|tool_call|>{_LIST}<|/tool_call|>",
    "functools": f"functools{_LIST}",
    "granite": f"<|tool_call|>{_LIST}",
    "granite_20b": f"<function_call> {_LINES.replace(chr(10), chr(10) + '<function_call> ')}",
    "internlm": '<|action_start|><|plugin|>\n{"name": "weather", "parameters": '
    f'{_P}}}\n<|action_end|><|action_start|><|plugin|>{{"name": "time", "parameters": {_R}}}'
    "<|action_end|>",
    "gigachat3": f"function call<|role_sep|>\n{_LINES}",
    "gigachat31": f"<|function_call|>{_LINES}",
    "xlam": f"```json\n{_LIST}\n```",
    "harmony": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{_P}"
    f"<|call|><|start|>assistant to=functions.time<|channel|>commentary json<|message|>{_R}",
    "llama3_json": f'<|python_tag|>{{"name": "weather", "parameters": {_P}}}; '
    f'{{"name": "time", "parameters": {_R}}}',
}
"""Two calls in every format; the last of a harmony answer ends with the text."""

BARE = ("llama3_json", "pythonic", "xlam")
"""Formats whose calls are the whole response."""
