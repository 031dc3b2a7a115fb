"""What a chat template accepts, found by rendering a few small conversations.

Templates raise, or silently omit messages, where a conversation has a form that their authors did
not expect: a system message in the middle, two messages of the user in a row, content as parts, a
call without text. The source does not show which. Each template is therefore probed once when it is
loaded, and :mod:`tgi_cli.text.conversation` adapts conversations to the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Message = dict[str, Any]
Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]] | None], str | None]
"""Renders messages and tools without a generation prompt. None if the template refuses them."""

SHORT_ID = 9
"""Letters and digits in a call's id, for templates that refuse others (Mistral's)."""


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a chat template accepts. The defaults change no conversation.

    A template accepts a conversation if it raises nothing, renders the text of all messages in
    their order, and does not change that when messages follow.

    Attributes:
        parts: Content must be a list of parts instead of a string.
        system: A system message at the start.
        later_system: A system message after the first turn.
        developer: The role ``developer``, which it distinguishes.
        adjacent_users: Two messages of the user in a row.
        adjacent_assistants: Two messages of the assistant in a row.
        assistant_first: A conversation that begins with the assistant.
        empty_replies: A message of the assistant without text and calls.
        user_after_result: A message of the user after the result of a call.
        calls: Calls in messages of the assistant.
        results: Messages of the role ``tool``.
        no_content: The content of a message with calls alone, an empty string or None.
        string_arguments: The arguments of calls must be JSON text instead of objects.
        calls_with_text: Text and calls in one message.
        parallel_calls: Several calls in one message.
        short_ids: Ids of calls must have :data:`SHORT_ID` letters and digits.
    """

    parts: bool = False
    system: bool = True
    later_system: bool = True
    developer: bool = True
    adjacent_users: bool = True
    adjacent_assistants: bool = True
    assistant_first: bool = True
    empty_replies: bool = True
    user_after_result: bool = True
    calls: bool = True
    results: bool = True
    no_content: str | None = ""
    string_arguments: bool = False
    calls_with_text: bool = True
    parallel_calls: bool = True
    short_ids: bool = False


def probe(render: Render, source: str, takes_tools: bool) -> TemplateTraits:
    """Find the traits of a template in 20 to 50 renderings.

    A template that does not render even a plain conversation gets the default traits.

    Args:
        source: The template.
        takes_tools: Whether it has the variable ``tools``.
    """
    for parts in (False, True):
        prober = _Prober(render, parts)
        # Some templates are meant for requests with tools alone, and fail without.
        if not prober.accepts(*_PLAIN) and takes_tools:
            prober = _Prober(render, parts, _TOOLS)
        if prober.accepts(*_PLAIN):
            return prober.traits(source, takes_tools)
    return TemplateTraits()


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


_SYSTEM = _message("system", "Probe one.")
_DEVELOPER = _message("developer", "Probe one.")
_LATER = _message("system", "Probe two.")
_USER = _message("user", "Probe three.")
_SECOND = _message("user", "Probe four.")
_ASSISTANT = _message("assistant", "Probe five.")
_REPLY = _message("assistant", "Probe six.")
_END = _message("user", "Probe seven.")
_PLAIN = (_USER, _ASSISTANT, _END)
_FUNCTION = {
    "name": "probe_function",
    "description": "Probe.",
    "parameters": {
        "type": "object",
        "properties": {"probe_parameter": {"type": "string", "description": "Probe."}},
        "required": ["probe_parameter"],
    },
}
_TOOLS = ({"type": "function", "function": _FUNCTION},)
_WRONG = ("{'probe_key'", '\\"probe_key', "None")
"""Python's form of an object, JSON that was encoded twice, and an absent content."""


@dataclass(frozen=True, slots=True)
class _CallForm:
    """A form of messages with calls."""

    no_content: str | None = ""
    string_arguments: bool = False
    short_ids: bool = False

    def call(self, *numbers: int, text: str = "") -> Message:
        calls = []
        for number in numbers:
            value = f"probe_value_{number}"
            json_text = f'{{"probe_key": "{value}"}}'
            arguments = json_text if self.string_arguments else {"probe_key": value}
            function = {"name": f"probe_call_{number}", "arguments": arguments}
            calls.append({"id": self._id(number), "type": "function", "function": function})
        return {"role": "assistant", "content": text or self.no_content, "tool_calls": calls}

    def result(self, number: int) -> Message:
        identity = {"name": f"probe_call_{number}", "tool_call_id": self._id(number)}
        return {"role": "tool", **identity, "content": f"Probe result {number}."}

    def _id(self, number: int) -> str:
        return f"Probe012{number}" if self.short_ids else f"call_0123456789abcdefghijklm{number}"


_CALL_FORMS = tuple(
    _CallForm(no_content, string, short)
    for short in (False, True)
    for string in (False, True)
    for no_content in ("", None)
)
"""The first that a template accepts is used."""


class _Prober:
    """Renders conversations with one template.

    Args:
        tools: Tools of all conversations.
    """

    def __init__(
        self, render: Render, parts: bool, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        self._render = render
        self._parts = parts
        self._tools = tools
        self._grows = True

    def accepts(self, *messages: Message) -> bool:
        """Whether the template renders the texts of all messages in their order."""
        text = self._rendered(messages)
        return text is not None and _in_order(text, messages)

    def traits(self, source: str, takes_tools: bool) -> TemplateTraits:
        """The traits of a template that renders ``_PLAIN``."""
        self._grows = self._extends(_PLAIN, 1) and self._extends((*_PLAIN, _REPLY, _SECOND), 3)
        system = self._stable((_SYSTEM, *_PLAIN), 2)
        plain = TemplateTraits(
            parts=self._parts,
            system=system,
            later_system=self._takes_later(system),
            developer="developer" in source and self._stable((_DEVELOPER, *_PLAIN), 2),
            adjacent_users=self._stable((_USER, _SECOND, _ASSISTANT, _END), 2),
            adjacent_assistants=self.accepts(_USER, _ASSISTANT, _REPLY, _END),
            assistant_first=self.accepts(_ASSISTANT, _END),
            empty_replies=self.accepts(_USER, _message("assistant", ""), _END),
        )
        if takes_tools:
            self._tools = _TOOLS
            plain = replace(plain, later_system=plain.later_system and self._takes_later(system))
        if "tool_calls" not in source:
            return replace(plain, calls=False, results=False)
        return self._with_calls(plain)

    def _takes_later(self, system: bool) -> bool:
        """Whether a system message may be anywhere.

        Some templates take it for the first one, or describe the tools in it, where there is none
        at the start.
        """
        starts: Sequence[tuple[Message, ...]] = ((), (_SYSTEM,)) if system else ((),)
        return all(
            self._stable((*start, _USER, _LATER, _ASSISTANT, _END), len(start) + 1, len(start) + 2)
            and self._stable((*start, _USER, _ASSISTANT, _LATER, _END, _REPLY), len(start) + 4)
            for start in starts
        )

    def _with_calls(self, plain: TemplateTraits) -> TemplateTraits:
        """The same with the traits of calls and their results."""
        for results in (True, False):
            for form in _CALL_FORMS:
                behind = (form.result(0), _REPLY, _END) if results else (_END,)
                if self.accepts(_USER, form.call(0), *behind):
                    return self._of_calls(plain, form, results)
        return replace(plain, calls=False, results=False)

    def _of_calls(self, plain: TemplateTraits, form: _CallForm, results: bool) -> TemplateTraits:
        one = (form.result(0), _REPLY) if results else ()
        two = (form.result(0), form.result(1), _REPLY) if results else ()
        after = (_USER, form.call(0), form.result(0), _SECOND, _REPLY, _END)
        return replace(
            plain,
            results=results,
            user_after_result=not results or self.accepts(*after),
            no_content=form.no_content,
            string_arguments=form.string_arguments,
            calls_with_text=self.accepts(_USER, form.call(0, text="Probe ten."), *one, _END),
            parallel_calls=self.accepts(_USER, form.call(0, 1), *two, _END),
            short_ids=form.short_ids,
        )

    def _stable(self, messages: Sequence[Message], *lengths: int) -> bool:
        """Whether the rendering of the first messages remains when others follow."""
        return self.accepts(*messages) and (
            not self._grows or all(self._extends(messages, length) for length in lengths)
        )

    def _extends(self, messages: Sequence[Message], length: int) -> bool:
        """Whether the rendering of messages begins with that of the first ones."""
        begin, whole = self._rendered(messages[:length]), self._rendered(messages)
        return begin is not None and whole is not None and whole.startswith(begin)

    def _rendered(self, messages: Sequence[Message]) -> str | None:
        if self._parts:
            messages = [with_parts(message) for message in messages]
        return self._render(messages, self._tools)


def with_parts(message: Mapping[str, Any]) -> Message:
    """The message with its text as a list of parts."""
    content = message.get("content")
    if not isinstance(content, str):
        return dict(message)
    return {**message, "content": [{"type": "text", "text": content}]}


def _in_order(text: str, messages: Sequence[Message]) -> bool:
    """Whether a rendering has the texts of all messages, each after those of the last one."""
    start = 0
    for message in messages:
        found = [text.find(part, start) for part in _texts(message)]
        if -1 in found:
            return False
        start = max(found, default=start)
    return not any(wrong in text for wrong in _WRONG)


def _texts(message: Message) -> Iterator[str]:
    if message["content"]:
        yield message["content"]
    for call in message.get("tool_calls", ()):
        name = call["function"]["name"]
        yield name
        yield name.replace("call", "value")  # the argument's
