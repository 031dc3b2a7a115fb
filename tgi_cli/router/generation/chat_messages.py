"""The messages of a chat request, in the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tgi_cli.router.api.schemas.openai import ChatMessage, ChatRequest, ContentPart
from tgi_cli.router.generation.image_parts import IMAGE_TYPES, image_part
from tgi_cli.router.generation.prompt_images import PromptImageLoader
from tgi_cli.router.http import errors
from tgi_cli.text.chat_template import ChatTemplate
from tgi_cli.text.conversation import adapt
from tgi_cli.text.images import ImageMarks, with_images_behind_results
from tgi_cli.text.response_format import ResponseFormat
from tgi_cli.text.tools import tool_prompt, with_calls_as_text, with_tools_in_front

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""OpenAI's roles; messages of all but the assistant must have content."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the reasoning in templates; all of them are set, as in transformers."""


@dataclass(frozen=True, slots=True)
class TemplateChat:
    """A conversation in the form that the chat template accepts.

    Attributes:
        messages: Never empty.
        tools: Tools that the template describes, or None.
        marks: Its images, with the mark that stands for each in the messages.
        in_parts: The template takes them as parts; otherwise their placeholders are in the texts.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    marks: ImageMarks
    in_parts: bool

    @property
    def image_mark(self) -> str | None:
        """What the template's parts of images are made of, or None if there are none."""
        return self.marks.mark if self.marks.images and self.in_parts else None

    def behind_images(self, text: str) -> str:
        """What follows the last image in a text of the messages."""
        return text.rpartition(self.marks.mark)[2]


def template_chat(
    body: ChatRequest,
    tools: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
    form: ResponseFormat | None,
    images: PromptImageLoader,
) -> TemplateChat:
    """The conversation of a request for the chat template. Raises ApiError.

    Args:
        tools: Tools that the model may call.
        form: How responses are parsed.
        images: Whether and how the model takes images.
    """
    reader = _MessageReader(images)
    messages: Sequence[Mapping[str, Any]] = [
        reader.read(index, each) for index, each in enumerate(body.messages)
    ]
    marks = reader.marks
    images.check(marks.images, "messages")
    described = form is not None and form.tools_as_text
    traits = template.traits(bool(tools) and not described)
    calls, results = described or not traits.calls, described or not traits.results
    tool_format = form.tools if form is not None else None
    try:
        if (calls or results) and any(m["role"] == "tool" or "tool_calls" in m for m in messages):
            messages = with_calls_as_text(messages, tool_format, calls=calls, results=results)
        if described and tools:
            prompt = tool_prompt(tool_format) if body.tool_prompt is None else body.tool_prompt
            messages = with_tools_in_front(messages, tools, prompt)
    except RecursionError as error:
        raise errors.validation("`tools` are nested too deeply", "tools") from error
    if marks.images and images.in_parts and not images.in_results:
        messages = with_images_behind_results(messages, marks.mark)
    adapted = adapt(messages, traits)
    if not adapted:
        raise errors.validation("`messages` have no text", "messages")
    if marks.images and not images.in_parts:
        adapted = marks.replaced(adapted, images.image_format.text)
    return TemplateChat(adapted, None if described else tools or None, marks, images.in_parts)


class _MessageReader:
    """Makes texts of the contents of messages, with a mark for each image.

    Attributes:
        marks: The images so far.
    """

    def __init__(self, images: PromptImageLoader) -> None:
        self._images = images
        self.marks = ImageMarks()

    def read(self, index: int, message: ChatMessage) -> dict[str, Any]:
        """A message with text as its content and the arguments of its calls as objects."""
        role = message.role
        if role not in _ROLES:
            raise errors.validation(
                f"messages[{index}].role must be one of {', '.join(_ROLES)}. Given: {role}",
                "messages",
            )
        if message.content is None and role != "assistant":
            raise errors.validation(
                f"messages[{index}] of role {role} has no `content`", "messages"
            )
        if role == "function":
            role = "tool"  # its newer name
        rendered: dict[str, Any] = {"role": role, "content": self._content(message)}
        for name in ("name", "tool_call_id"):
            value = getattr(message, name)
            if value is not None:
                rendered[name] = value
        reasoning = message.reasoning_content or message.reasoning
        if reasoning:
            rendered |= dict.fromkeys(_REASONING, reasoning)
        if message.tool_calls:
            rendered["tool_calls"] = [_call(call) for call in message.tool_calls]
        return rendered

    def _content(self, message: ChatMessage) -> str:
        if not isinstance(message.content, list):
            return message.content or ""
        return "".join([self._text(message.role, part) for part in message.content])

    def _text(self, role: str, part: ContentPart) -> str:
        if part.type in IMAGE_TYPES:
            self._images.require(part.type, "messages")
            if role == "assistant":
                raise errors.validation("messages of the assistant may not have images", "messages")
            return self.marks.add(image_part(part, "messages"))
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal") or text is None:
            raise errors.validation(
                f"content of type `{part.type}` is not supported by this model", "messages"
            )
        return text


def _custom_call(custom: Any) -> dict[str, Any]:
    """The call of a custom tool as that of the function that it is for the model."""
    text = custom.get("input") if isinstance(custom, dict) else None
    if not isinstance(text, str):
        raise errors.validation("the call of a custom tool must have its `input`", "messages")
    return {"name": custom.get("name"), "arguments": {"input": text}}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if call.get("type") == "custom":
        function = _custom_call(call.get("custom"))
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise errors.validation("a tool call must name its function", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise errors.validation(
                f"tool call arguments are not valid JSON: {error}", "messages"
            ) from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise errors.validation("tool call arguments must be a JSON object", "messages")
    call_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {
        **call_id,
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
