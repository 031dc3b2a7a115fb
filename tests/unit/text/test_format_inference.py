"""Formats of calls, inferred from what templates write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.text import tiny
from tests.unit.text.call_samples import TOOLS
from tests.unit.text.test_response_parser import calls, read
from tgi_cli.text.bundle import TextBundle
from tgi_cli.text.formats.inference import infer_tool_format
from tgi_cli.text.formats.probe import Render, probe_calls
from tgi_cli.text.formats.syntax import ToolFormat
from tgi_cli.text.formats.tools import TOOL_FORMATS
from tgi_cli.text.formats.written import written_calls


def writing(form: ToolFormat, start: str = "<|im_start|>assistant\n", thought: str = "") -> Render:
    """A template that writes the calls of a format."""

    def render(messages: Sequence[Mapping[str, Any]], prompt: bool) -> str | None:
        text = "<|im_start|>user\nProbe question.<|im_end|>\n" + start
        if prompt:
            return text
        functions = [call["function"] for call in messages[1].get("tool_calls", ())]
        if len(functions) > 1 and form.grammar is not None and form.grammar.single:
            return None
        written = [(each["name"], each["arguments"]) for each in functions]
        call = written_calls(form, written) if written else ""
        return f"{text}{thought}{messages[1]['content']}{call}<|im_end|>\n"

    return render


OTHERS = {
    "minicpm5",
    "step3",
    "llama3_json",
    "xlam",
    "pythonic",
    "harmony",
    "kimi_k3",
    "kimi_k2",
    "solar",
}
"""Inferred in part: what is bare has a pattern of its own, counters have other digits, and marks
around each call within marks around all are not told apart."""


@pytest.mark.parametrize("name", sorted(set(TOOL_FORMATS) - OTHERS))
def test_the_known_formats_are_inferred(name: str) -> None:
    known = TOOL_FORMATS[name]
    for thought in ("", "<think>\n\n</think>\n\n"):
        probe = probe_calls(writing(known, thought=thought), ["</think>"])
        assert probe is not None
        found = infer_tool_format(probe)
        assert found is not None
        assert (found.grammar, found.syntax) == (known.grammar, known.syntax)
        assert probe.is_read(found)
        assert probe.is_read(known)


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_what_is_inferred_reads_what_the_template_writes(name: str) -> None:
    probe = probe_calls(writing(TOOL_FORMATS[name], "<|im_start|>assistant\n"))
    assert probe is not None
    found = infer_tool_format(probe)
    assert found is None or probe.is_read(found)
    assert probe.is_read(TOOL_FORMATS[name])
    assert found is not None or name == "kimi_k3"


def test_a_template_without_calls_has_no_format() -> None:
    def render(messages: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        return f"<user>hi<assistant>{'' if prompt else messages[1]['content']}"

    assert probe_calls(render) is None
    assert probe_calls(lambda messages, prompt: None) is None


TEMPLATE = """\
{%% if tools %%}<tools>{{ tools | tojson }}</tools>{%% endif %%}
{%%- for message in messages %%}<{{ message.role }}>{{ message.content }}
{%%- for call in message.tool_calls or () %%}%s{%% endfor %%}</turn>
{%%- endfor %%}{%% if add_generation_prompt %%}<assistant>{%% endif %%}"""


ACT = (
    '<act>{"tool": "{{ call.function.name }}", "with": '
    "{{ call.function.arguments | tojson }}}</act>"
)
ITEMS = "{% for key, value in call.function.arguments.items() %}"


def bundle(folder: Path, call: str) -> TextBundle:
    tiny.write_model(folder, TEMPLATE % call)
    return TextBundle.load(folder, tool_call_parser="auto", reasoning_parser="auto")


@pytest.mark.parametrize(
    ("call", "written"),
    [
        (
            ACT,
            '<act>{"tool": "weather", "with": {"city": "Rome"}}</act>',
        ),
        (
            "[[{{ call.function.name }}]]{{ call.function.arguments | tojson }}<end>",
            '[[weather]]{"city": "Rome"}<end>',
        ),
        (
            f'<do it="{{{{ call.function.name }}}}">{ITEMS}'
            "<in {{ key }}>{{ value if value is string else value | tojson }}</in>"
            "{% endfor %}</do>",
            '<do it="weather"><in city>Rome</in></do>',
        ),
        (
            f"<py>{{{{ call.function.name }}}}({ITEMS}"
            "{{ key }}={{ value | tojson }}{{ ', ' if not loop.last }}{% endfor %})</py>",
            '<py>weather(city="Rome")</py>',
        ),
    ],
    ids=["json", "named", "tags", "literals"],
)
def test_calls_of_an_unknown_template_are_parsed(tmp_path: Path, call: str, written: str) -> None:
    form = bundle(tmp_path, call).response_format
    assert form is not None
    assert form.tools is not None
    assert form.tools not in TOOL_FORMATS.values()
    for text in (written, f"Well. {written}"):
        message = read(form, list(text), tools=TOOLS)
        assert calls(message) == [("weather", {"city": "Rome"})]
        assert message.content == text.removesuffix(written).strip()


def test_marks_of_another_format_do_not_decide(tmp_path: Path) -> None:
    """A template may mention a mark that its calls do not have."""
    call = "{# <tool_call> #}<act>{{ call.function | tojson }}</act>"
    form = bundle(tmp_path, call).response_format
    assert form is not None
    assert form.tools is not TOOL_FORMATS["hermes"]


def test_calls_of_an_unknown_form_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    call = "<tool_call>{{ call.function.arguments | tojson }}: {{ call.function.name }}</tool_call>"
    form = bundle(tmp_path, call).response_format
    assert form is None or not form.knows_tools
    assert "unknown format" in caplog.text


def test_a_text_that_only_resembles_an_inferred_call_is_content(tmp_path: Path) -> None:
    form = bundle(tmp_path, ACT).response_format
    assert form is not None
    text = '<act>{"with": 1}</act> and <act'
    message = read(form, list(text), tools=TOOLS)
    assert message.calls == []
    assert json.dumps(message.content.replace(" ", "")) == json.dumps(text.replace(" ", ""))


def test_marks_that_only_the_rendering_has_are_found(tmp_path: Path) -> None:
    call = "{{ '<tool' ~ '_call>' }}{{ call.function | tojson }}{{ '</tool' ~ '_call>' }}"
    template = TEMPLATE.replace("<assistant>", "<assistant>{{ '<thi' ~ 'nk>' }}")
    tiny.write_model(tmp_path, template % call)
    form = TextBundle.load(
        tmp_path, tool_call_parser="auto", reasoning_parser="auto"
    ).response_format
    assert form is not None
    assert form.tools is TOOL_FORMATS["hermes"]
    assert form.markers.open == "<think>"
