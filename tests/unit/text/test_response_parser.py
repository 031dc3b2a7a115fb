"""Reading answers: every format, every way to cut a text, and transformers as the judge."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers.utils.chat_parsing import parse_response

from tests.unit.text import tiny
from tests.unit.text.call_samples import BARE, PARIS, ROME, TOOLS, TWO
from tgi_cli.config.settings import SETTINGS
from tgi_cli.errors import ConfigError
from tgi_cli.text.formats.detect import compose
from tgi_cli.text.formats.reasoning import REASONING_FORMATS
from tgi_cli.text.formats.tools import TOOL_FORMATS
from tgi_cli.text.formats.written import written_calls
from tgi_cli.text.response_format import ResponseFormat, choose_response_format
from tgi_cli.text.response_parser import Content, ParsedResponse, Reasoning, ResponsePart
from tgi_cli.text.tokenizer import Tokenizer

PENDING = {
    "harmony": "<|channel|>commentary to=functions." + "f" * 2000,
    "qwen3_coder": "<tool_call>" + " " * 2000,
    "glm45": "<tool_call>" + "f" * 2000,
    "mistral": "[TOOL_CALLS]f[CALL_ID]" + "x" * 2000,
    "deepseek": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>" + "f" * 2000,
    "llama3_json": " " * 2000,
    "glm47": "<tool_call>" + " " * 2000,
    "kimi_k2": "<|tool_call_begin|>functions." + "f" * 2000,
    "solar": "<|tool_call:begin|>a<|tool_call:name|>" + "f" * 2000,
    "functionary": "<function=" + "f" * 2000,
    "minicpm5": '<function name="' + "f" * 2000,
    "pythonic": "[" + "f" * 2000,
}
"""What begins like a call, and goes on until it cannot be one."""


@pytest.mark.parametrize("name", PENDING)
def test_possible_calls_are_not_held_back_endlessly(tokenizer: Tokenizer, name: str) -> None:
    """Each token would have all of it looked at again."""
    reader = form(tokenizer, name).parser("", tools=TOOLS)
    assert reader is not None
    found = [piece for letter in PENDING[name] for piece in reader.push(letter)]
    assert len(reader._raw) < 600
    found += reader.push("|")
    assert ParsedResponse.of([*found, *reader.finish()]).content == PENDING[name] + "|"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny.byte_level())


def form(tokenizer: Tokenizer, tools: str | None, reasoning: str | None = None) -> ResponseFormat:
    known = TOOL_FORMATS[tools] if tools else None
    template = compose(known, REASONING_FORMATS[reasoning] if reasoning else None)
    assert template is not None
    return ResponseFormat(template, tokenizer, known)


def read(
    form: ResponseFormat, pieces: list[str], prompt: str = "", tools: Any = TOOLS, **options: Any
) -> ParsedResponse:
    reader = form.parser(prompt, tools=tools, **options)
    assert reader is not None
    found = [piece for text in pieces for piece in reader.push(text)] + reader.finish()
    return ParsedResponse.of(found)


def cuts(text: str, count: int = 25) -> list[list[str]]:
    """The text whole, letter by letter, and cut at random."""
    ways = [[text], list(text)]
    chance = random.Random(7)
    for _ in range(count):
        places = sorted(chance.sample(range(len(text)), min(len(text), chance.randint(1, 9))))
        ways.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    return ways


def calls(message: ParsedResponse) -> list[tuple[str, Any]]:
    return [
        (call.name, json.loads(arguments))
        for call, arguments in zip(message.calls, message.arguments, strict=True)
    ]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_two_calls_however_they_are_cut(tokenizer: Tokenizer, name: str) -> None:
    reasoning = "harmony" if name == "harmony" else None
    for pieces in cuts(TWO[name]):
        message = read(form(tokenizer, name, reasoning), pieces)
        assert calls(message) == [("weather", PARIS), ("time", ROME)], pieces
        assert (message.content, message.reasoning) == ("", "")
        assert [call.index for call in message.calls] == [0, 1]
        assert len({call.id for call in message.calls}) == 2


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_that_are_written_in_a_format_are_parsed(tokenizer: Tokenizer, name: str) -> None:
    given: dict[str, Any] = {
        "city": "a \"b\" 'c'\n<d>\\",
        "days": -3,
        "deep": {"k": ["v", None, True, 1.5], "e": {}},
        "none": None,
    }
    text = written_calls(TOOL_FORMATS[name], [("weather", given), ("time", {})])
    assert text is not None
    if TOOL_FORMATS[name].grammar.single:
        text = text[: text.index('{"name": "time"')]
    message = read(form(tokenizer, name, "harmony" if name == "harmony" else None), [text])
    assert calls(message)[0] == ("weather", given)
    assert [name for name, _ in calls(message)[1:]] in (["time"], [])
    assert message.content == ""


JUDGED = sorted(
    name
    for name, known in TOOL_FORMATS.items()
    if known.syntax is None
    and name not in ("llama3_json", "minimax", "xlam", "gigachat3", "gigachat31", "granite_20b")
)


@pytest.mark.parametrize("name", JUDGED)
def test_transformers_reads_the_same_calls(name: str) -> None:
    """Its parser takes one JSON value for a region, where some models write several."""
    reasoning = REASONING_FORMATS["harmony"] if name == "harmony" else None
    template = compose(TOOL_FORMATS[name], reasoning)
    message = parse_response(TWO[name], template, prefix="", tools=TOOLS)
    found = message["tool_calls"]
    found = found[0] if isinstance(found[0], list) else found
    assert [call["function"] for call in found] == [
        {"name": "weather", "arguments": PARIS},
        {"name": "time", "arguments": ROME},
    ]


@pytest.mark.parametrize("name", sorted(set(TOOL_FORMATS) - {*BARE, "harmony"}))
def test_text_around_calls(tokenizer: Tokenizer, name: str) -> None:
    text = f"<think>\nhm, \n</think>\n\nLet me see.\n\n{TWO[name]}"
    for pieces in cuts(text):
        message = read(form(tokenizer, name, "think"), pieces)
        assert message.reasoning == "hm,"
        assert message.content == "Let me see."
        assert len(message.calls) == 2


def test_harmony(tokenizer: Tokenizer) -> None:
    text = (
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>Looking.<|end|><|start|>assistant<|channel|>analysis<|message|>More.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Done <b>."
    )
    for pieces in cuts(text):
        message = read(form(tokenizer, "harmony", "harmony"), pieces)
        assert (message.reasoning, message.content) == ("Think.\nMore.", "Looking.\nDone <b>.")
    prompt = "<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>final<|message|>And"
    assert read(form(tokenizer, "harmony", "harmony"), [" so"], prompt).content == " so"


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("<|im_start|>assistant\n<think>\n", "why\n</think>\n\nbecause", "why", "because"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", " yes ", "", " yes "),
        ("<|im_start|>assistant\n", "<think>a</think>b\n", "a", "b\n"),
        ("<|im_start|>assistant\n<think>", "cut off", "cut off", ""),
        ("a <think> in the question\n", " \n plain <b> \n", "", " \n plain <b> \n"),
        ("", "\n<thi", "", "\n<thi"),
    ],
)
def test_reasoning(
    tokenizer: Tokenizer, prompt: str, text: str, reasoning: str, content: str
) -> None:
    for pieces in cuts(text):
        message = read(form(tokenizer, "hermes", "think"), pieces, prompt)
        assert (message.reasoning, message.content) == (reasoning, content)
    assert read(form(tokenizer, None, "think"), [text], prompt, tools=()).content == content


def test_an_answer_goes_on_within_its_reasoning(tokenizer: Tokenizer) -> None:
    reader = form(tokenizer, None, "think").parser("x<think>so ", continued="<think>so ")
    assert reader is not None
    pieces: list[ResponsePart] = [*reader.push("far</think> good"), *reader.finish()]
    assert pieces == [Reasoning("far"), Content("good")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "a <tool_call>no JSON</tool_call> b"),
        ("hermes", 'a <tool_call>{"arguments": {"x": 1}}</tool_call> b'),
        ("hermes", '<tool_call>{"na'),
        ("hermes", "use <tool_ca"),
        ("qwen3_coder", "<tool_call>\n<funct"),
        ("mistral_list", "[TOOL_CALLS] [1, 2]"),
        ("llama3_json", '{"name": "unknown", "parameters": {}}'),
        ("llama3_json", '{"title": "weather"}'),
        ("llama3_json", 'Call {"name": "weather", "parameters": {}}'),
    ],
)
def test_invalid_calls_become_content(tokenizer: Tokenizer, name: str, text: str) -> None:
    for pieces in cuts(text):
        message = read(form(tokenizer, name), pieces)
        assert message.calls == []
        assert message.content.replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>{"name": "time"}</tool_call>', "{}"),
        ('<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>', '{"a": 1}'),
        ('<tool_call>{"name": "time", "arguments": {"a": [1, ', '{"a": [1,'),
        ('<tool_call>{"name": "time", ', ""),
    ],
)
def test_arguments(tokenizer: Tokenizer, text: str, arguments: str) -> None:
    for pieces in cuts(text):
        message = read(form(tokenizer, "hermes"), pieces)
        assert [call.name for call in message.calls] == ["time"]
        assert message.arguments == [arguments]


def test_arguments_are_streamed(tokenizer: Tokenizer) -> None:
    reader = form(tokenizer, "hermes").parser("", tools=TOOLS)
    assert reader is not None
    steps = ["Sure. <tool", '_call>{"name": "time",', ' "arguments": {"a"', ": 1", "}}</tool_call>"]
    assert [[type(piece).__name__ for piece in reader.push(step)] for step in steps] == [
        ["Content"],
        ["ToolCallStart"],
        ["ToolCallArguments"],
        ["ToolCallArguments"],
        ["ToolCallArguments"],
    ]


def test_only_the_first_call_is_returned_unless_parallel(tokenizer: Tokenizer) -> None:
    for pieces in cuts(TWO["hermes"]):
        message = read(form(tokenizer, "hermes"), pieces, parallel=False)
        assert calls(message) == [("weather", PARIS)]


def test_without_tools_a_marker_is_text(tokenizer: Tokenizer) -> None:
    assert form(tokenizer, "hermes").parser("") is None
    text = TWO["hermes"]
    assert read(form(tokenizer, "hermes", "think"), [text], tools=()).content == text


def test_ids(tokenizer: Tokenizer) -> None:
    """Mistral's templates refuse any others than nine letters or digits."""
    [first, _] = read(form(tokenizer, "mistral"), [TWO["mistral"]]).calls
    assert len(first.id) == 9
    assert first.id.isalnum()
    [other, _] = read(form(tokenizer, "hermes"), [TWO["hermes"]]).calls
    assert other.id.startswith("call_")


@given(st.lists(st.sampled_from([
    "<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "time", ', '"arguments": ',
    "{}", '"', "}", "\n", " ", "a", "<", "\\", "[", ",", '{"name":"weather","arguments":{"x":1}}',
]), max_size=14))  # fmt: skip
def test_any_text_any_cut(parts: list[str]) -> None:
    reader_of = form(_TOKENIZER, "hermes", "think")
    text = "".join(parts)
    whole = read(reader_of, [text])
    for pieces in (parts, list(text)):
        message = read(reader_of, pieces)
        assert (message.content, message.reasoning) == (whole.content, whole.reasoning)
        assert [call.name for call in message.calls] == [call.name for call in whole.calls]
        assert message.arguments == whole.arguments


_TOKENIZER = Tokenizer(tiny.byte_level())


class TestChoosing:
    def test_by_the_template(self, tokenizer: Tokenizer) -> None:
        def chosen(text: str) -> tuple[Any, ...]:
            form = choose_response_format(tokenizer, text, True)
            if form is None:
                return None, None
            tools = next((n for n, f in TOOL_FORMATS.items() if f is form.tools), None)
            return tools, form.knows_reasoning

        assert chosen("plain {{ tools }}") == (None, None)
        assert chosen("<tool_call> {{ tools }}") == ("hermes", False)
        assert chosen("<tool_call> <think> {{ tools }}") == ("hermes", True)
        assert chosen("<tool_call><function=x>") == ("qwen3_coder", False)
        assert chosen("<tool_call><arg_key>") == ("glm45", False)
        assert chosen("[TOOL_CALLS]") == ("mistral_list", False)
        assert chosen("[TOOL_CALLS][ARGS][THINK][/THINK]") == ("mistral", True)
        assert chosen("<|channel|><|message|>") == ("harmony", True)
        assert chosen('<|python_tag|> "parameters"') == ("llama3_json", False)
        assert chosen("</think>") == (None, True)

    def test_by_tokens(self) -> None:
        backend = tiny.byte_level()
        backend.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True), "<think>"])
        tokenizer = Tokenizer(backend)
        form = choose_response_format(tokenizer, "{{ tools }}", True)
        assert form is not None
        assert form.tools is TOOL_FORMATS["mistral_list"]
        marker, think = (backend.token_to_id(text) for text in ("[TOOL_CALLS]", "<think>"))
        assert form.shown(True) == {marker, think}
        assert form.shown(False) == {think}

    def test_templates_of_calls_are_loaded_with_the_first_tools(self, tokenizer: Tokenizer) -> None:
        form = choose_response_format(tokenizer, "plain", False)
        assert form is not None
        assert form.parser("") is None
        assert not form.loaded
        assert form.parser("", tools=TOOLS) is not None
        assert form.loaded
        thinking = choose_response_format(tokenizer, "</think>", True)
        assert thinking is not None
        assert thinking.loaded

    def test_templates_without_tools_use_the_fallback_format(self, tokenizer: Tokenizer) -> None:
        form = choose_response_format(tokenizer, "plain", False)
        assert form is not None
        assert form.tools_as_text
        assert form.tools is TOOL_FORMATS["hermes"]

    def test_by_name(self, tokenizer: Tokenizer) -> None:
        assert (
            choose_response_format(tokenizer, "<tool_call><think>", True, None, "none", "none")
            is None
        )
        form = choose_response_format(
            tokenizer, "<tool_call>", True, None, "llama3_json", "seed_oss"
        )
        assert form is not None
        assert form.tools is TOOL_FORMATS["llama3_json"]
        for flags in (("xml", "auto"), ("auto", "deep")):
            with pytest.raises(ConfigError, match="is unknown"):
                choose_response_format(tokenizer, "", True, None, *flags)

    def test_the_models_own_template_takes_precedence(
        self, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
    ) -> None:
        own = {
            "start_anchor": "<a>",
            "fields": {
                "content": {},
                "thinking": {"open": "(", "close": ")"},
                "tool_calls": {
                    "open_pattern": r"!(?P<name>\w+)\(",
                    "close": ";",
                    "content": "kv-lines",
                    "content_args": {"line_sep": ",", "kv_sep": "="},
                    "repeats": True,
                    "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
                },
            },
        }
        form = choose_response_format(tokenizer, "<tool_call>", True, own)
        assert form is not None
        for pieces in cuts("(hm) Well !weather(city=Paris,days=3; !time("):
            message = read(form, pieces, "<u>(x<a>")
            assert message.reasoning == "hm"
            assert message.content == "Well"
            assert calls(message) == [("weather", {"city": "Paris", "days": 3}), ("time", {})]
        assert choose_response_format(tokenizer, "", True, own, "hermes", "none") is not form
        broken = choose_response_format(tokenizer, "<tool_call>", True, {"fields": {}})
        assert broken is not None
        assert broken.tools is TOOL_FORMATS["hermes"]
        assert "response template is not used" in caplog.text


def test_every_format_is_a_template_of_transformers(tokenizer: Tokenizer) -> None:
    for tools in (None, *TOOL_FORMATS):
        for reasoning in (None, *REASONING_FORMATS):
            if tools or reasoning:
                form(tokenizer, tools, reasoning)


@pytest.mark.parametrize(
    ("setting", "formats"),
    [("tool_call_parser", TOOL_FORMATS), ("reasoning_parser", REASONING_FORMATS)],
)
def test_every_format_can_be_set(setting: str, formats: dict[str, Any]) -> None:
    [choices] = [each.kind.choices for each in SETTINGS if each.name == setting]
    assert set(choices) == {"auto", "none", *formats}
