"""Adapts conversations to what a chat template accepts.

Every decision depends on the template and on earlier messages only, never on later ones. So the
prompt of a turn remains a prefix of the next turn's, which the prefix cache then has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from tgi_cli.text.template_traits import SHORT_ID, TemplateTraits

Message = dict[str, Any]

INSTRUCTIONS = ("system", "developer")
"""Roles of instructions."""
REMINDER = ("<system-reminder>\n", "\n</system-reminder>")
"""Around a system message that has become text of the user."""
USER_TEXT = ("<user-message>\n", "\n</user-message>")
"""Around text of the user that has become part of a tool's result."""
_JOIN = "\n\n"


def adapt(messages: Sequence[Mapping[str, Any]], traits: TemplateTraits) -> list[Message]:
    """The conversation in a form that the template accepts.

    Takes 1 to 3 µs a message. Contents are strings; the arguments of calls are objects.

    - System and developer messages at the start become one message, or the beginning of the first
      message of the user.
    - A later one stays where it is, or becomes text of the user, in :data:`REMINDER`.
    - Adjacent messages of a role are joined where the template refuses them.
    - A user's text after a tool's result becomes a part of it, in :data:`USER_TEXT`, where the
      template refuses it.
    - Calls get the form that the template expects.
    """
    first = instructions(messages)
    adapted = _Adapted(traits)
    if first:
        adapted.begin(first)
    for message in messages[len(first) :]:
        adapted.add(message)
    return adapted.finish()


def instructions(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The system and developer messages at the start."""
    return list(takewhile(lambda message: message["role"] in INSTRUCTIONS, messages))


class _Adapted:
    """The adapted messages so far.

    Texts that are joined to the last message are kept in a list until it is complete: adding each
    to a string would take time that grows with the square of their number.
    """

    def __init__(self, traits: TemplateTraits) -> None:
        self._traits = traits
        self._messages: list[Message] = []
        self._texts: list[str] = []
        """Texts to append to the last message's content."""
        self._names: dict[str, str] = {}
        """Functions by the ids of their calls."""
        self._waiting: dict[str, Any] = {}
        """Calls of the last message with several that have not been rendered, by id."""
        self._open = False
        """The last message is the beginning of the user's first message."""

    def begin(self, first: Sequence[Mapping[str, Any]]) -> None:
        """Add the instructions at the start."""
        only_developer = all(message["role"] == "developer" for message in first)
        role = "developer" if only_developer and self._traits.developer else "system"
        message = {**first[0], "role": role}
        self._open = not self._traits.system and role == "system"
        if self._open:
            message["role"] = "user"
        self._append(message)
        self._texts += [each["content"] for each in first[1:]]

    def add(self, message: Mapping[str, Any]) -> None:
        """Add the next message."""
        role = message["role"]
        if role == "tool":
            self._add_result(message)
            return
        self._flush()
        if role == "assistant":
            self._add_assistant(message)
        elif role == "user":
            self._add_user(message, message["content"])
        elif role not in INSTRUCTIONS:
            self._append(dict(message))
        elif self._traits.later_system:
            self._append({**message, "role": "system"})
        else:
            text = REMINDER[0] + message["content"] + REMINDER[1]
            self._add_user({"role": "user", "content": text}, text, marked=True)

    def finish(self) -> list[Message]:
        """All messages."""
        self._flush()
        self._complete()
        return self._messages

    def _add_user(self, message: Mapping[str, Any], text: str, marked: bool = False) -> None:
        last = self._last_role()
        if last == "user" and (self._open or not self._traits.adjacent_users):
            self._texts.append(text)
        elif last == "tool" and not self._traits.user_after_result:
            self._texts.append(text if marked else USER_TEXT[0] + text + USER_TEXT[1])
        else:
            self._append(dict(message))
        self._open = False

    def _add_assistant(self, message: Mapping[str, Any]) -> None:
        traits, calls = self._traits, message.get("tool_calls")
        if not calls:
            if message["content"] or traits.empty_replies or len(message) > 2:
                self._append_assistant(dict(message))
            return
        calls = [self._call(call) for call in calls]
        text = message["content"]
        rest = {**message, "content": text or traits.no_content, "tool_calls": calls}
        if text and not traits.calls_with_text and traits.adjacent_assistants:
            self._append_assistant({"role": "assistant", "content": text})
            rest["content"] = traits.no_content
        if len(calls) > 1 and not traits.parallel_calls:
            rest["tool_calls"] = calls[:1]
            self._waiting = {call.get("id", index): call for index, call in enumerate(calls[1:])}
        self._append_assistant(rest)

    def _append_assistant(self, message: Message) -> None:
        last = self._last_role()
        if last is None and not self._traits.assistant_first:
            self._append({"role": "user", "content": ""})
        if last != "assistant" or self._traits.adjacent_assistants:
            self._append(message)
            return
        if message["content"]:
            self._texts.append(message["content"])
        before = self._messages[-1]
        calls = message.pop("tool_calls", [])
        before |= {**message, "content": before["content"]}
        if calls:
            before.setdefault("tool_calls", []).extend(calls)
            before["content"] = before["content"] or self._traits.no_content

    def _add_result(self, message: Mapping[str, Any]) -> None:
        result = dict(message)
        call_id = message.get("tool_call_id")
        if call_id is not None:
            if "name" not in message and call_id in self._names:
                result["name"] = self._names[call_id]
            result["tool_call_id"] = call_id = self._id(call_id)
        if self._waiting and call_id in self._waiting:
            self._append_call(self._waiting.pop(call_id))
        self._append(result)

    def _flush(self) -> None:
        """Add the calls that got no result."""
        for call in self._waiting.values():
            self._append_call(call)
        self._waiting = {}

    def _append_call(self, call: Mapping[str, Any]) -> None:
        content = self._traits.no_content
        self._append({"role": "assistant", "content": content, "tool_calls": [call]})

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        adapted = dict(call)
        if "id" in call:
            self._names[call["id"]] = function["name"]
            adapted["id"] = self._id(call["id"])
        if self._traits.string_arguments:
            text = json.dumps(function["arguments"], ensure_ascii=False)
            adapted["function"] = {**function, "arguments": text}
        return adapted

    def _id(self, call_id: str) -> str:
        if not self._traits.short_ids or (len(call_id) == SHORT_ID and call_id.isalnum()):
            return call_id
        return hashlib.blake2b(call_id.encode(errors="replace")).hexdigest()[:SHORT_ID]

    def _last_role(self) -> str | None:
        return self._messages[-1]["role"] if self._messages else None

    def _append(self, message: Message) -> None:
        if self._texts:
            self._complete()
        self._messages.append(message)

    def _complete(self) -> None:
        """Join the texts that belong to the last message."""
        if self._texts:
            last = self._messages[-1]
            last["content"] = _JOIN.join(filter(None, (last["content"], *self._texts)))
            self._texts = []
