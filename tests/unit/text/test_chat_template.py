"""Chat templates: where they come from, and that they render as transformers renders them."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.unit.text import tiny
from tests.unit.text.miniature_templates import PARTS
from tgi_cli.errors import ConfigError, ModelError
from tgi_cli.process.worker_pool import Limits
from tgi_cli.text.bundle import TextBundle
from tgi_cli.text.chat_template import ChatTemplate, ChatTemplateError
from tgi_cli.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "Héllo <b>"}]

TEMPLATES = {
    "chatml": tiny.CHAT_TEMPLATE,
    "blocks": """
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- generation %}[{{ message.content | trim }}]{% endgeneration %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
{%- endfor %}
{{ messages | tojson }} {{ {"b": 1, "a": [1, 2]} | tojson(indent=2) }}
{%- set ns = namespace(found=false) %}{% set ns.found = true %}{{ ns.found }}
{%- if tools %}{{ tools | tojson }}{% endif %}
{{- strftime_now("%Y") }}{{ messages[::-1][0].role }}{{ eos_token }}{{ dict(a=1).a }}
""",
}

CONVERSATIONS = {
    "user": USER,
    "several": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": " two  "},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "深"},
    ],
    "continued": [*USER, {"role": "assistant", "content": "Sure, "}],
    "continued bare": [*USER, {"role": "assistant", "content": "Sure"}],
}


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"bos_token": tiny.BOS, "eos_token": tiny.EOS})


@pytest.mark.tgi_pain(1)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers(name: str, conversation: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages: list[dict[str, Any]] = CONVERSATIONS[conversation]
    continued = messages[-1]["role"] == "assistant"
    if continued and name == "blocks":
        return  # the template quotes messages a second time behind the one to be continued
    expected, _ = render_jinja_template(
        [messages],
        chat_template=TEMPLATES[name],
        add_generation_prompt=not continued,
        continue_final_message=continued,
        bos_token=tiny.BOS,
        eos_token=tiny.EOS,
    )
    assert template(TEMPLATES[name]).render(messages) == expected[0]


def test_tools_choose_the_template_for_them() -> None:
    chat = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0].name }}"}, {})
    assert chat.render(USER) == "plain"
    assert chat.render(USER, tools=[{"name": "search"}]) == "search"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[0].nothing.deeper }}", "has no attribute"),
        ("{{ messages[7] + 1 }}", "no element 7"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set ns = namespace(__class__=1) %}", "may not store"),
    ],
)
def test_refusals_and_sandbox_violations_raise_errors(source: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        template(source).render(USER)


def test_invalid_templates_are_found_at_once(tmp_path: Path) -> None:
    tiny.write_model(tmp_path, "{% for %}")
    with pytest.raises(ModelError, match="chat template is invalid"):
        ChatTemplate.load(tmp_path, Tokenizer.load(tmp_path))


def test_a_dropped_final_message_cannot_be_continued() -> None:
    with pytest.raises(ChatTemplateError, match="drops the final message"):
        template("nothing").render([*USER, {"role": "assistant", "content": "Sure"}])


def test_templates_are_found_in_all_kinds_of_files(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tiny.write_model(tmp_path, None))

    def rendered() -> str:
        chat = ChatTemplate.load(tmp_path, tokenizer)
        assert chat is not None
        return chat.render(USER)

    assert ChatTemplate.load(tmp_path, tokenizer) is None
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "list"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert rendered() == "list"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert rendered() == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja {{ eos_token }}")
    assert rendered() == f"jinja {tiny.EOS}"


class TestVariables:
    SOURCE = "{% if enable_thinking %}think {% endif %}{{ documents | length }}{{ bos_token }}"

    def test_variables_that_the_template_uses_may_be_set(self) -> None:
        chat = template(self.SOURCE)
        assert chat.variables == {"enable_thinking", "documents", "bos_token"}
        assert chat.accepts("enable_thinking")
        assert chat.accepts("reasoning_effort")
        for name in ("messages", "tools", "bos_token", "tokenizer", "anything"):
            assert not chat.accepts(name)
        variables = {"enable_thinking": True, "documents": [{}, {}], "bos_token": "x"}
        assert chat.render(USER, variables=variables) == f"think 2{tiny.BOS}"

    def test_variables_of_the_request_take_precedence(self) -> None:
        source = "{% if tools is not defined %}{% set tools = none %}{% endif %}{{ tools }}"
        assert template(source).takes_tools
        assert not template("{% for tools in messages %}{{ tools }}{% endfor %}").takes_tools
        assert not template(tiny.CHAT_TEMPLATE).takes_tools


class TestEnd:
    ANSWERED = CONVERSATIONS["continued"]

    def test_generation_prompt_is_optional(self) -> None:
        chat = template(tiny.CHAT_TEMPLATE)
        assert chat.render(USER).endswith("<|im_start|>assistant\n")
        assert chat.render(USER, add_generation_prompt=False).endswith("<b><|im_end|>\n")

    def test_final_message_is_continued_on_request(self) -> None:
        chat = template(tiny.CHAT_TEMPLATE)
        assert chat.render(USER, continue_final_message=True).endswith("user\nHéllo <b>")
        assert chat.render(self.ANSWERED, continue_final_message=True).endswith("Sure, ")
        ended = chat.render(self.ANSWERED, continue_final_message=False)
        assert ended.endswith("Sure, <|im_end|>\n<|im_start|>assistant\n")
        with pytest.raises(ChatTemplateError, match="no text to continue"):
            chat.render([{"role": "assistant", "content": ""}], continue_final_message=True)


def test_another_tokenizer_config(tmp_path: Path) -> None:
    """Its template is the one that counts; without one, the folder's is."""
    path = tiny.write_model(tmp_path / "model")
    (path / "chat_template.jinja").write_text("folder {{ eos_token }}")
    other = tmp_path / "other.json"
    for config, expected in (
        ({"chat_template": "other {{ pad_token }}", "pad_token": "<pad>"}, "other <pad>"),
        ({}, f"folder {tiny.EOS}"),
    ):
        other.write_text(json.dumps(config))
        chat = TextBundle.load(path, tokenizer_config_path=other).chat_template
        assert chat is not None
        assert chat.render(USER) == expected
    with pytest.raises(ConfigError, match="is not a file"):
        TextBundle.load(path, tokenizer_config_path=tmp_path / "none.json")


def test_a_given_template(tmp_path: Path) -> None:
    """A file, or the source itself. Its special tokens are the model's."""
    path = tiny.write_model(tmp_path / "model")
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"chat_template": "other", "eos_token": "<end>"}))
    file = tmp_path / "given.jinja"
    file.write_bytes(b"given\r\n{{ eos_token }}")
    for given, expected in ((str(file), "given\n"), ("{{ messages[0].content }}", "Héllo <b>")):
        chat = TextBundle.load(path, chat_template=given, tokenizer_config_path=other).chat_template
        assert chat is not None
        assert chat.render(USER) == expected + (tiny.EOS if given == str(file) else "")
    for wrong, cause in (
        (str(tmp_path / "none.jinja"), "none.jinja is not a file"),
        ("{% if %}", "--chat-template: .* is invalid"),
    ):
        with pytest.raises(ConfigError, match=cause):
            TextBundle.load(path, chat_template=wrong)
    file.write_bytes(b"x" * (2 << 20))
    with pytest.raises(ConfigError, match="cannot be read"):
        TextBundle.load(path, chat_template=str(file))


def test_content_becomes_parts_where_the_template_expects_them() -> None:
    with closing(template(PARTS)) as chat:
        assert chat.traits(False).parts
        assert chat.render(USER) == "<user>Héllo <b></>"
        told = [*USER, {"role": "assistant", "content": "Sure, "}]
        assert chat.render(told) == "<user>Héllo <b></><assistant>Sure, "


HOSTILE = {
    "product": "{{ 'a' * 10**9 }}",
    "width": '{{ "%2000000000d" % 1 }}',
    "format": "{{ '{:>2000000000}'.format(1) }}",
    "center": "{{ 'x' | center(10**9) }}",
    "indent": "{{ ('x\n' * 1000) | indent(10**7) }}",
    "tojson": "{{ {'a': [1, 2] * 1000} | tojson(indent=10**6) }}",
    "list": "{{ ([0] * 10**9) | length }}",
    "doubled": "{% set ns = namespace(a='x') %}{% for i in range(60) %}"
    "{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "strftime": "{{ strftime_now('%Y' * 10**8) }}",
    "cause": "{{ raise_exception('x' * 10**9) }}",
}


@pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded by what /proc says")
@pytest.mark.parametrize("name", HOSTILE)
def test_memory_is_bounded(name: str) -> None:
    """Whether it is the compiler that evaluates the expression, or the rendering."""
    limits = Limits(processes=1, seconds=60.0, megabytes=256)
    with pytest.raises(ChatTemplateError, match=r"takes more than 256 MB of memory to (r|c)"):
        ChatTemplate({"default": HOSTILE[name]}, {}, limits).render(USER)


NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"


def limited(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {}, Limits(processes=1, seconds=1, megabytes=256))


def test_time_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    chat = limited(
        "{% if messages | length > 1 %}"
        + NESTED.replace("BODY", "")
        + "{% endif %}{{ messages | length }}"
    )
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match=r"template takes more than 1 s to render"):
            chat.render(USER * 2)
        assert chat.render(USER) == "1"
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    with pytest.raises(ChatTemplateError, match=r"template takes more than 1 s to compile"):
        limited("{{ (10**(10**9)) % 7 }}")


def test_the_prompt_is_bounded() -> None:
    chat = template(NESTED.replace("BODY", "x"))
    with pytest.raises(ChatTemplateError, match="writes more than 1048576 characters"):
        chat.render(USER)
    large = [{"role": "user", "content": "x" * 2_000_000}]
    assert len(template("{{ messages[0].content * 4 }}").render(large)) == 8_000_000


def test_a_large_conversation_is_rendered() -> None:
    messages = [{"role": "user", "content": f"message {i}"} for i in range(50_000)]
    text = template(tiny.CHAT_TEMPLATE).render(messages)
    assert text.count("<|im_start|>") == 50_001
    assert "message 49999<|im_end|>" in text


@pytest.mark.parametrize("depth", [200, 100_000])
def test_deeply_nested_conversations_are_refused(depth: int) -> None:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    chat = template("{{ messages | length }}")
    if depth == 200:
        assert chat.render(USER, variables={"documents": value}) == "1"
    else:
        with pytest.raises(ChatTemplateError, match="nested too deeply"):
            chat.render(USER, variables={"documents": value})


@pytest.mark.parametrize(
    "source",
    ["{% if 1 %}" * 3000 + "{% endif %}" * 3000, "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}"],
    ids=["blocks", "brackets"],
)
def test_deeply_nested_templates_are_invalid(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="chat template is invalid: RecursionError"):
        template(source)


def test_large_files_and_too_many_of_them(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tiny.write_model(tmp_path, None))
    main = tmp_path / "chat_template.jinja"
    with main.open("wb") as file:
        file.truncate(200 << 20)
    with pytest.raises(ModelError, match=r"chat_template.jinja cannot be read: .* 1 MiB"):
        ChatTemplate.load(tmp_path, tokenizer)
    main.write_bytes(b"\xff")
    with pytest.raises(ModelError, match="'utf-8' codec"):
        ChatTemplate.load(tmp_path, tokenizer)
    main.unlink()
    extra = tmp_path / "additional_chat_templates"
    extra.mkdir()
    for number in range(33):
        (extra / f"{number}.jinja").write_text("x")
    with pytest.raises(ModelError, match="more than 32 chat templates"):
        ChatTemplate.load(tmp_path, tokenizer)
    for path in extra.iterdir():
        path.unlink()
    named: list[Any] = [{"name": "default", "template": "x" * ((1 << 20) + 1)}]
    for wrong, cause in (
        (named, "more than 1048576 bytes"),
        ([{"name": 1, "template": "x"}], "not a string"),
    ):
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": wrong}))
        with pytest.raises(ModelError, match=cause):
            ChatTemplate.load(tmp_path, tokenizer)


def test_a_template_beyond_the_limits_is_a_model_error(tmp_path: Path) -> None:
    tiny.write_model(tmp_path, HOSTILE["strftime"])
    with pytest.raises(ModelError, match=r"takes more than 256 MB of memory to compile"):
        ChatTemplate.load(tmp_path, Tokenizer.load(tmp_path))


async def test_rendering_without_blocking(tmp_path: Path) -> None:
    chat = template(tiny.CHAT_TEMPLATE)
    large = [{"role": "user", "content": "x" * 500_000}]
    for messages in (USER, large, USER * 500):
        assert await chat.render_async(messages) == chat.render(messages)
    long = "né\ud800 " * 500_000
    assert long in await chat.render_async([{"role": "user", "content": long}])
    tools = [{"name": "f", "arguments": {"x": float("nan"), "y": 1 << 70, "z": "\ud800"}}]
    both = template("{{ tools | tojson }}")
    assert await both.render_async(USER, tools) == both.render(USER, tools)
    assert '"x": NaN, "y": 1180591620717411303424, "z": "\ud800"' in both.render(USER, tools)
    with pytest.raises(ChatTemplateError, match="unsafe"):
        await template("{{ ''.__class__.__mro__ }}").render_async(USER)
