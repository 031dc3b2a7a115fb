"""Conversations in the form that a chat template accepts."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.text.miniature_templates import TEMPLATES
from tgi_cli.text.conversation import REMINDER, USER_TEXT, adapt
from tgi_cli.text.template_process import Templates
from tgi_cli.text.template_traits import TemplateTraits, with_parts
from tgi_cli.text.tools import with_calls_as_text

Message = dict[str, Any]

TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def developer(text: str) -> Message:
    return {"role": "developer", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def reply(text: str, *ids: str, **fields: Any) -> Message:
    message: Message = {"role": "assistant", "content": text, **fields}
    if ids:
        message["tool_calls"] = [
            {"id": each, "type": "function", "function": {"name": "find", "arguments": {"k": each}}}
            for each in ids
        ]
    return message


def result(call_id: str, text: str = "found") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def shape(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Roles and contents, with the ids of calls instead of the content where there are any."""
    return [
        (message["role"], [call["id"] for call in message.get("tool_calls", ())] or content)
        for message in messages
        for content in [message["content"]]
    ]


class TestInstructions:
    def test_those_at_the_start_become_one_message(self) -> None:
        told = [system("a"), developer("b"), system("c"), user("d")]
        assert shape(adapt(told, TemplateTraits())) == [("system", "a\n\nb\n\nc"), ("user", "d")]

    @pytest.mark.parametrize(("distinguished", "role"), [(True, "developer"), (False, "system")])
    def test_developer_role_remains_where_it_is_distinguished(
        self, distinguished: bool, role: str
    ) -> None:
        adapted = adapt([developer("a"), developer("b")], TemplateTraits(developer=distinguished))
        assert shape(adapted) == [(role, "a\n\nb")]

    def test_without_a_system_role_they_begin_the_first_message_of_the_user(self) -> None:
        traits = TemplateTraits(system=False, later_system=False)
        told = [system("a"), system("b"), user("c"), user("d")]
        assert shape(adapt(told, traits)) == [("user", "a\n\nb\n\nc"), ("user", "d")]
        assert shape(adapt([system("a"), reply("b")], traits)) == [
            ("user", "a"),
            ("assistant", "b"),
        ]

    def test_a_later_one_stays_where_it_is(self) -> None:
        told = [user("a"), developer("b"), reply("c"), system("d")]
        assert shape(adapt(told, TemplateTraits())) == [
            ("user", "a"),
            ("system", "b"),
            ("assistant", "c"),
            ("system", "d"),
        ]

    def test_a_later_one_that_is_refused_becomes_marked_text_of_the_user(self) -> None:
        told = [system("s"), user("a"), system("b"), reply("c"), user("d")]
        marked = REMINDER[0] + "b" + REMINDER[1]
        apart = adapt(told, TemplateTraits(later_system=False))
        assert shape(apart)[1:3] == [("user", "a"), ("user", marked)]
        joined = adapt(told, TemplateTraits(later_system=False, adjacent_users=False))
        assert shape(joined)[1:3] == [("user", f"a\n\n{marked}"), ("assistant", "c")]

    def test_other_roles_remain(self) -> None:
        told = [user("a"), {"role": "observation", "content": "b"}]
        assert adapt(told, TemplateTraits(later_system=False)) == told


class TestAdjacentMessages:
    def test_they_remain_where_the_template_takes_them(self) -> None:
        told = [user("a"), user("b"), reply("c"), reply("d")]
        assert adapt(told, TemplateTraits()) == told

    def test_messages_of_the_user_are_joined(self) -> None:
        told = [user("a"), user("b"), user("c"), reply("d"), user("e")]
        adapted = adapt(told, TemplateTraits(adjacent_users=False))
        assert shape(adapted) == [("user", "a\n\nb\n\nc"), ("assistant", "d"), ("user", "e")]
        assert told[0] == user("a")

    def test_messages_of_the_assistant_are_joined_with_their_calls_and_reasoning(self) -> None:
        told = [user("a"), reply("b", reasoning="r"), reply("", "1"), reply("c", "2", name="n")]
        [_, joined] = adapt(told, TemplateTraits(adjacent_assistants=False))
        assert joined["content"] == "b\n\nc"
        assert [call["id"] for call in joined["tool_calls"]] == ["1", "2"]
        assert (joined["reasoning"], joined["name"]) == ("r", "n")

    def test_a_conversation_may_have_to_begin_with_the_user(self) -> None:
        adapted = adapt([reply("a"), user("b")], TemplateTraits(assistant_first=False))
        assert shape(adapted) == [("user", ""), ("assistant", "a"), ("user", "b")]

    def test_empty_replies_are_left_out_where_they_are_refused(self) -> None:
        told = [user("a"), reply(""), user("b"), reply("", reasoning="r")]
        assert adapt(told, TemplateTraits()) == told
        adapted = adapt(told, TemplateTraits(empty_replies=False, adjacent_users=False))
        assert shape(adapted) == [("user", "a\n\nb"), ("assistant", "")]

    def test_text_behind_a_result_becomes_a_part_of_it(self) -> None:
        told = [user("a"), reply("", "1"), result("1"), user("b"), system("c"), reply("d")]
        traits = TemplateTraits(user_after_result=False, later_system=False)
        [*_, found, last] = adapt(told, traits)
        marked = [USER_TEXT[0] + "b" + USER_TEXT[1], REMINDER[0] + "c" + REMINDER[1]]
        assert found["content"] == "\n\n".join(["found", *marked])
        assert last == reply("d")
        assert adapt(told[:4], TemplateTraits())[-1] == user("b")


class TestCalls:
    def test_results_get_the_name_of_their_function(self) -> None:
        [*_, one, other] = adapt(
            [reply("", "1"), {**result("1"), "name": "given"}, result("1")], TemplateTraits()
        )
        assert (one["name"], other["name"]) == ("given", "find")

    def test_content_and_arguments_get_the_form_of_the_template(self) -> None:
        traits = TemplateTraits(no_content=None, string_arguments=True)
        [alone, both] = adapt([reply("", "1"), reply("text", "ü")], traits)
        assert (alone["content"], both["content"]) == (None, "text")
        assert alone["tool_calls"][0]["function"] == {"name": "find", "arguments": '{"k": "1"}'}
        assert both["tool_calls"][0]["function"]["arguments"] == '{"k": "ü"}'

    def test_long_ids_are_shortened_to_the_same_letters_each_time(self) -> None:
        traits = TemplateTraits(short_ids=True)
        told = [reply("", "call_123456", "Abcdef012"), result("call_123456"), result("Abcdef012")]
        [calls, one, other] = adapt(told, traits)
        ids = [call["id"] for call in calls["tool_calls"]]
        assert ids == [one["tool_call_id"], other["tool_call_id"]]
        assert (len(ids[0]), ids[0].isalnum(), ids[1]) == (9, True, "Abcdef012")
        assert adapt(told, traits) == [calls, one, other]
        assert adapt([reply("", "call_123457")], traits)[0]["tool_calls"][0]["id"] != ids[0]

    def test_text_and_calls_become_two_messages(self) -> None:
        traits = TemplateTraits(calls_with_text=False, no_content=None)
        [text, call] = adapt([reply("a", "1", reasoning="r")], traits)
        assert text == {"role": "assistant", "content": "a"}
        assert (call["content"], call["reasoning"]) == (None, "r")
        strict = TemplateTraits(calls_with_text=False, adjacent_assistants=False)
        assert adapt([reply("a", "1")], strict) == [reply("a", "1")]

    def test_parallel_calls_become_messages_with_one_each(self) -> None:
        traits = TemplateTraits(parallel_calls=False)
        told = [reply("", "1", "2", "3"), result("1"), result("2"), user("a")]
        assert shape(adapt(told, traits)) == [
            ("assistant", ["1"]),
            ("tool", "found"),
            ("assistant", ["2"]),
            ("tool", "found"),
            ("assistant", ["3"]),
            ("user", "a"),
        ]
        assert shape(adapt(told[:2], traits))[2:] == [("assistant", ["2"]), ("assistant", ["3"])]


def test_the_request_itself_is_not_changed() -> None:
    told = [system("a"), system("b"), user("c"), user("d"), reply("e", "1", "2"), result("2")]
    before = json.dumps(told)
    for _, traits in TEMPLATES.values():
        adapt(told, traits)
        assert json.dumps(told) == before


# ---------------------------------------------------------------------- prefixes

_TEXTS = st.sampled_from(["a", "a b\nc", "ü", "<x>"])


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Messages of all roles with different texts. Results follow their calls."""
    told: list[Message] = []
    count = 0

    def text() -> str:
        nonlocal count
        count += 1
        return f"[{count}]{draw(_TEXTS)}"

    kinds = st.sampled_from(["system", "developer", "user", "user", "reply", "reply", "calls"])
    for kind in draw(st.lists(kinds, min_size=2, max_size=9)):
        if kind in ("system", "developer", "user"):
            told.append({"role": kind, "content": text()})
        elif kind == "reply":
            told.append(reply(text(), **_reasoning(draw)))
        else:
            ids = [f"call_{count}_{index}" for index in range(draw(st.integers(1, 2)))]
            told.append(reply(draw(st.sampled_from(["", text()])), *ids, **_reasoning(draw)))
            told += [result(each, text()) for each in draw(st.permutations(ids))]
    return told


def _reasoning(draw: st.DrawFn) -> dict[str, str]:
    return {"reasoning_content": "hmm"} if draw(st.booleans()) else {}


@functools.cache
def compiled(name: str) -> Templates:
    return Templates({"default": TEMPLATES[name][0]}, {})


def rendered(name: str, messages: Sequence[Message]) -> str:
    traits = TEMPLATES[name][1]
    calls, results = not traits.calls, not traits.results
    converted = with_calls_as_text(messages, None, calls=calls, results=results)
    adapted = adapt(converted, traits)
    given = {
        "messages": [with_parts(each) for each in adapted] if traits.parts else adapted,
        "tools": TOOLS,
        "add_generation_prompt": False,
    }
    job = {"job": "render", "name": "default", "most": 1 << 20, "variables": {}, "given": given}
    answer = compiled(name)(json.dumps(job).encode())
    assert "error" not in answer, (answer, adapted)
    text: str = answer["text"]
    return text


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(messages=conversations())
def test_a_turn_is_a_prefix_of_the_next(name: str, messages: list[Message]) -> None:
    """With the reply to come; other messages may be joined to the last one, behind its text."""
    for end in range(1, len(messages)):
        last, following = messages[end - 1], messages[end]
        if last["role"] == "assistant" or not any(m["role"] == "user" for m in messages[:end]):
            continue
        if last["role"] == "tool" and following["role"] == "tool":
            continue  # no turn: the calls have not all been answered
        turn, longer = rendered(name, messages[:end]), rendered(name, messages[: end + 1])
        if following["role"] == "assistant":
            assert longer.startswith(turn)
        elif name != "strips_thinking":
            end_of_text = turn.rindex(last["content"]) + len(last["content"])
            assert longer.startswith(turn[:end_of_text])


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "strips_thinking"])
@settings(max_examples=30, deadline=None)
@given(messages=conversations())
def test_each_request_begins_with_the_one_before(name: str, messages: list[Message]) -> None:
    """With a reply and what follows it, up to the next reply."""
    before = ""
    for end in range(1, len(messages)):
        roles = [message["role"] for message in messages[: end + 1]]
        if roles[-1] == "assistant" and roles[-2] != "assistant" and "user" in roles:
            request = rendered(name, messages[:end])
            assert request.startswith(before)
            before = request


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "last_turn"])
@settings(max_examples=30, deadline=None)
@given(messages=conversations())
def test_no_text_and_no_call_is_lost(name: str, messages: list[Message]) -> None:
    text = rendered(name, messages)
    for message in messages:
        assert message["content"] in text
        for call in message.get("tool_calls", ()):
            assert f'"k": "{call["id"]}"' in text
