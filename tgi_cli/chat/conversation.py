"""The messages of a chat, and the files that keep them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tgi_cli.chat.errors import ChatInputError
from tgi_cli.chat.parameters import PARAMETERS
from tgi_cli.files import read_json

_FILE_BYTES = 256 << 20
"""Limit for a saved conversation: its images are part of it."""

_ROLES = ("user", "assistant")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AttachedImage:
    """An image for a message.

    Attributes:
        url: a ``data:`` URL.
        name: what the user calls it.
        description: its type and size.
    """

    url: str
    name: str
    description: str


@dataclass(slots=True)
class ChatConversation:
    """The messages so far, in OpenAI's form.

    Attributes:
        system: the system prompt; empty: none.
        messages: those of the user and the assistant, in turns.
        parameters: parameters of requests, by name.
    """

    system: str = ""
    messages: list[Message] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)

    def ask(self, text: str, images: tuple[AttachedImage, ...] = ()) -> None:
        """Append a message of the user."""
        content: Any = text
        if images:
            content = [{"type": "image_url", "image_url": {"url": image.url}} for image in images]
            content += [{"type": "text", "text": text}] if text else []
        self.messages.append({"role": "user", "content": content})

    def answer(self, text: str) -> None:
        """Append the assistant's answer, without its reasoning, which templates leave out."""
        self.messages.append({"role": "assistant", "content": text})

    def withdraw(self) -> Message | None:
        """Remove the last message of the user, and its answer; return the former, if any."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        return self.messages.pop() if self.messages else None

    def body(self, model: str) -> dict[str, Any]:
        """The body of the next request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {"model": model, "messages": [*system, *self.messages], **self.parameters}

    def save(self, path: Path, model: str) -> None:
        """Write the conversation: as Markdown if the name ends in ``.md``, else as JSON.

        JSON is the body of a request, so that curl can send it.

        Raises:
            ChatInputError: the file cannot be written.
        """
        if path.suffix.lower() in (".md", ".markdown"):
            text = self._markdown(model)
        else:
            text = json.dumps(self.body(model), ensure_ascii=False, indent=2) + "\n"
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ChatInputError(f"{path} cannot be written: {error.strerror or error}") from None

    def _markdown(self, model: str) -> str:
        parts = [f"# {model}\n"]
        if self.system:
            parts.append(f"## System\n\n{self.system}\n")
        for message in self.messages:
            parts.append(f"## {message['role'].capitalize()}\n\n{message_text(message)}\n")
        return "\n".join(parts)

    @classmethod
    def load(cls, path: Path) -> ChatConversation:
        """Read what :meth:`save` has written as JSON.

        Raises:
            ChatInputError: the file cannot be read, or is none.
        """
        try:
            body = read_json(path, _FILE_BYTES)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ChatInputError(f"{path} cannot be read: {why}") from None
        messages = body.get("messages") if isinstance(body, dict) else None
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise ChatInputError(f"{path} is not a conversation", "give one that /save has written")
        system = ""
        if messages and messages[0]["role"] == "system":
            system = message_text(messages.pop(0))
        if any(message["role"] != _ROLES[place % 2] for place, message in enumerate(messages)) or (
            len(messages) % 2
        ):
            raise ChatInputError(f"{path}: messages of user and assistant do not take turns")
        parameters = {name: body[name] for name in PARAMETERS if name in body}
        return cls(system, messages, parameters)


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.get("role") in ("system", *_ROLES)
        and isinstance(value.get("content"), (str, list))
    )


def message_text(message: Message) -> str:
    """The text of a message, with a word for each image."""
    content = message["content"]
    if isinstance(content, str):
        return content
    texts = [
        str(part.get("text", "")) if part.get("type") == "text" else "[image]"
        for part in content
        if isinstance(part, dict)
    ]
    return "\n".join(texts)


def has_images(messages: list[Message]) -> bool:
    """Whether any of these messages has an image."""
    return any(isinstance(message["content"], list) for message in messages)
