"""What chat templates accept is found by rendering."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.unit.text.miniature_templates import TEMPLATES
from tgi_cli.process.worker_pool import Limits
from tgi_cli.text.chat_template import ChatTemplate
from tgi_cli.text.template_process import Templates
from tgi_cli.text.template_traits import TemplateTraits, probe


def found(source: str) -> TemplateTraits:
    templates = Templates({"default": source}, {})
    variables = templates(b'{"job": "variables"}')["variables"]

    def render(
        messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> str | None:
        given = {"messages": messages, "tools": tools, "add_generation_prompt": False}
        job = {"job": "render", "name": "default", "most": 1 << 20, "variables": {}, "given": given}
        text: str | None = templates(json.dumps(job).encode()).get("text")
        return text

    return probe(render, source, "tools" in variables)


@pytest.mark.parametrize("name", TEMPLATES)
def test_restrictions_are_found(name: str) -> None:
    source, expected = TEMPLATES[name]
    assert found(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('never') }}",
        "{{ messages[0].content }}",  # drops all other messages
        "{% for m in messages %}{{ m.role }}{% endfor %}",
    ],
)
def test_a_template_without_plain_conversations_gets_the_defaults(source: str) -> None:
    assert found(source) == TemplateTraits()


def test_a_template_for_requests_with_tools_is_probed_with_tools() -> None:
    source = "{% for t in tools %}{{ t.function.name }}{% endfor %}" + TEMPLATES["no_system"][0]
    assert found(source) == TEMPLATES["no_system"][1]


def test_pythons_form_of_arguments_is_not_accepted() -> None:
    source = TEMPLATES["tools"][0].replace("arguments | tojson", "arguments")
    assert found(source) == TemplateTraits(developer=False, string_arguments=True)


def test_the_word_none_is_no_content() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}"
        "{% if m.content is not none %}{{ raise_exception('text') }}{% endif %}{{ m.content }}"
        "{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments.probe_key }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert not found(source).calls
    assert found(source.replace("{{ m.content }}{{ m.tool", "{{ m.tool")).no_content is None


def test_text_that_a_later_reply_removes_is_not_accepted() -> None:
    """A template may treat text in front of calls as reasoning, and strip it from earlier turns."""
    source = TEMPLATES["tools"][0].replace(
        "{{ m.content }}",
        "{% if not m.tool_calls or not messages[loop.index0 + 2:] %}{{ m.content }}{% endif %}",
    )
    assert found(source) == TemplateTraits(developer=False, calls_with_text=False)


def test_each_named_template_has_its_traits() -> None:
    sources = {"default": TEMPLATES["no_system"][0], "tool_use": TEMPLATES["tools"][0]}
    template = ChatTemplate(sources, {})
    try:
        assert template.traits(False) == TEMPLATES["no_system"][1]
        assert template.traits(True) == TEMPLATES["tools"][1]
    finally:
        template.close()


def test_a_template_that_exceeds_its_limits_gets_the_defaults() -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate({"default": loop}, {}, Limits(processes=1, seconds=0.2, megabytes=128))
    try:
        assert template.traits(False) == TemplateTraits()
    finally:
        template.close()
