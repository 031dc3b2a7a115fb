"""What holds in every format of reasoning and tool calls."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.text import tiny
from tests.unit.text.call_samples import TOOLS, TWO
from tests.unit.text.test_response_parser import calls, cuts, form, read
from tgi_cli.text.formats.calls import ToolCallArguments
from tgi_cli.text.formats.reasoning import REASONING_FORMATS
from tgi_cli.text.formats.tools import TOOL_FORMATS
from tgi_cli.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(tiny.byte_level())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return TOKENIZER


@st.composite
def jumbled(draw: st.DrawFn, name: str) -> list[str]:
    """Pieces of two calls in their order or out of it, and other text."""
    text = TWO[name]
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    if draw(st.booleans()):
        parts = draw(st.permutations(parts))
    extra = draw(
        st.lists(st.sampled_from(["a ", "<", "\n", '"', "}", "</think>", "é🤗"]), max_size=3)
    )
    return [*parts, *extra]


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_text_any_cut_in_every_format(name: str, data: st.DataObject) -> None:
    """The result does not depend on the cuts, and what is no call is not lost."""
    reader_of = form(TOKENIZER, name, "harmony" if name == "harmony" else "think")
    parts = data.draw(jumbled(name))
    text = "".join(parts)
    whole = read(reader_of, [text])
    for pieces in (parts, list(text)):
        message = read(reader_of, pieces)
        assert (message.content, message.reasoning) == (whole.content, whole.reasoning)
        assert [call.name for call in message.calls] == [call.name for call in whole.calls]
        assert message.arguments == whole.arguments
    if not whole.calls and name != "harmony" and "</think>" not in text:
        kept = (whole.content + whole.reasoning).replace(" ", "").replace("\n", "")
        assert kept == text.replace(" ", "").replace("\n", "")


THOUGHTS = {
    "gemma4": "<|channel>thought\nHm.\n<channel|>Yes.",
    "cohere": "<|START_THINKING|>Hm.<|END_THINKING|>Yes.",
    "apertus": "<|inner_prefix|>Hm.<|inner_suffix|>Yes.",
    "minimax_m3": "<mm:think>Hm.</mm:think>Yes.",
    "hunyuan_v3": "<think:opensource>Hm.</think:opensource>Yes.",
    "longcat": "<longcat_think>\nHm.\n</longcat_think>\nYes.",
    "kimi": "◁think▷Hm.◁/think▷Yes.",
    "kimi_k3": "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes."
    "<|close|>response<|sep|>",
    "solar": "<|think|>Hm.<|end|><|begin|>assistant<|content|>Yes.",
    "mistral": "[THINK]Hm.[/THINK]Yes.",
    "seed_oss": "<seed:think>Hm.</seed:think>Yes.",
    "granite": "Here is my thought process: Hm.\n\nHere is my response: Yes.",
    "apriel": "Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\nYes.",
    "think_response": "<think>Hm.</think>\n<response>Yes.</response>\n",
    "think_answer": "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>",
    "think": "<think>\nHm.\n</think>\n\nYes.",
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
    "<|message|>Yes.",
}


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_reasoning_in_every_format(tokenizer: Tokenizer, name: str) -> None:
    for pieces in cuts(THOUGHTS[name]):
        message = read(form(tokenizer, None, name), pieces, tools=())
        assert (message.reasoning, message.content) == ("Hm.", "Yes."), pieces


@pytest.mark.parametrize("name", ["think_response", "think_answer"])
def test_tags_around_the_content_may_be_missing(tokenizer: Tokenizer, name: str) -> None:
    tag = name.removeprefix("think_")
    for text in ("Yes.", f"Write <{tag}> and </{tag}> here."):
        for pieces in cuts(text):
            message = read(form(tokenizer, None, name), pieces, tools=())
            assert (message.reasoning, message.content) == ("", text)


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("qwen3_coder", "<tool_call><function=time><parameter=city>Ro", '{"city": "Ro'),
        ("qwen3_coder", "<tool_call><function=time><parameter=days>1", '{"days": '),
        ("glm45", "<tool_call>time<arg_key>city</arg_key><arg_value>Ro</arg", '{"city": "Ro'),
        ("gemma4", '<|tool_call>call:time{city:<|"|>Ro', '{"city": "Ro'),
        ("pythonic", "[time(city='Ro", '{"city": "Ro'),
    ],
)
def test_arguments_of_a_cut_off_call_are_not_closed(
    tokenizer: Tokenizer, name: str, text: str, arguments: str
) -> None:
    """Complete JSON would look like a call that may be executed."""
    for pieces in cuts(text):
        message = read(form(tokenizer, name), pieces)
        assert [call.name for call in message.calls] == ["time"]
        assert message.arguments == [arguments]


def test_strings_in_tags_are_streamed(tokenizer: Tokenizer) -> None:
    reader = form(tokenizer, "minimax_m2").parser("", tools=TOOLS)
    assert reader is not None
    reader.push('<minimax:tool_call><invoke name="time"><parameter name="city">')
    [part] = reader.push("Ro\nme")
    assert isinstance(part, ToolCallArguments)
    assert part.text == "Ro\\nme"
    assert reader.push("</para") == []


def test_ids_that_a_model_writes_are_kept(tokenizer: Tokenizer) -> None:
    found = read(form(tokenizer, "kimi_k2"), [TWO["kimi_k2"]]).calls
    assert [call.id for call in found] == ["functions.weather:0", "functions.time:1"]


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        (
            "pythonic",
            "[time(None, [1, (2.5, 'x')], k={'a': True, \"b\": []})]",
            [None, [1, [2.5, "x"]]],
        ),
        ("pythonic", "[time(city='a\\'b\\n\\u00e9\\x41\\\\', days=7)]", ["a'b\né" + "A\\", 7]),
        (
            "functiongemma",
            "<start_function_call>call:time{city:<escape>12<escape>,days:<escape>7<escape>}",
            ["12", 7],
        ),
        ("gemma4", "<|tool_call>call:time{city:12,days:7.0}", ["12", 7]),
        (
            "qwen3_coder",
            "<tool_call><function=time>\n<parameter=city>\n12\n</parameter>"
            "<parameter=days>7.0</parameter></function>",
            ["12", 7],
        ),
        (
            "minicpm5",
            '<function name="time"><param name="city"><![CDATA[</param> <b>]]></param>'
            '<param name="days">7</param></function>',
            ["</param> <b>", 7],
        ),
        (
            "minimax_m2",
            '<minimax:tool_call><invoke name="time"><parameter name="city">\n x \n</parameter>'
            '<parameter name="days">seven</parameter></invoke>',
            ["\n x \n", "seven"],
        ),
    ],
)
def test_values_follow_the_schema(
    tokenizer: Tokenizer, name: str, text: str, arguments: list[Any]
) -> None:
    for pieces in cuts(text):
        [(_, found)] = calls(read(form(tokenizer, name), pieces))
        assert [found["city"], found["days"]] == arguments
