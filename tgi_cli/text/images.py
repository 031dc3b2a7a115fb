"""Images within texts.

Conversations are joined, moved and rendered as texts (:mod:`tgi_cli.text.conversation`). An image
is a mark in the text of its message until the chat template is rendered, so that whatever happens
to the text happens to the image. A mark cannot be guessed, so no text of a client contains one.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_OPEN, _CLOSE = "![](", ")"
_IMAGE_FOLLOWS = "The result is the image that follows."


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image of a prompt, as the client sent it.

    Attributes:
        source: A URL (``data:``, ``http:``, ``https:``), or the bytes of its file.
        detail: OpenAI's ``auto``, ``low``, ``high`` or ``original``, or None.
        media_type: That of ``source`` if it is bytes and the client named one, such as
            ``image/png``.
    """

    source: str | bytes
    detail: str | None = None
    media_type: str | None = None


class ImageMarks:
    """The images of one conversation, and the mark that stands for each in its texts.

    All have the same mark: which image it stands for is a matter of order.

    Attributes:
        images: In the order of their marks.
        mark: Letters, digits and punctuation that JSON does not escape.
    """

    def __init__(self) -> None:
        self.images: list[ImagePart] = []
        self.mark = f"<image {secrets.token_hex(16)}>"

    def add(self, image: ImagePart) -> str:
        """Add the next image. Returns its mark."""
        self.images.append(image)
        return self.mark

    def replaced(self, messages: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
        """The messages with a text in the place of each mark."""
        return [
            {**message, "content": message["content"].replace(self.mark, text)}
            if message["content"]
            else dict(message)
            for message in messages
        ]


def with_image_parts(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """The message with its content as a list of parts if it has images.

    The parts are transformers' ``{"type": "image"}`` and ``{"type": "text", "text": ...}``
    (https://huggingface.co/docs/transformers/chat_templating_multimodal).
    """
    content = message.get("content")
    if not isinstance(content, str) or mark not in content:
        return dict(message)
    parts: list[dict[str, str]] = []
    for index, text in enumerate(content.split(mark)):
        if index:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return {**message, "content": parts}


def with_images_behind_results(
    messages: Sequence[Mapping[str, Any]], mark: str
) -> list[Mapping[str, Any]]:
    """The conversation with images of results in a message of the user after the results.

    For templates that write images of the user alone.
    """
    moved: list[Mapping[str, Any]] = []
    waiting = 0
    for message in messages:
        if message["role"] == "tool":
            content = message["content"]
            if mark in content:
                waiting += content.count(mark)
                content = content.replace(mark, "") or _IMAGE_FOLLOWS
                message = {**message, "content": content}
        elif waiting:
            moved.append({"role": "user", "content": mark * waiting})
            waiting = 0
        moved.append(message)
    if waiting:
        moved.append({"role": "user", "content": mark * waiting})
    return moved


def markdown_images(text: str) -> Iterator[str]:
    """Split a text at TGI's images, ``![](URL)``: text, URL, text, URL, ..., text.

    Searches without a regular expression: the URL of an image is megabytes of base64.
    """
    start = 0
    while True:
        opening = text.find(_OPEN, start)
        closing = text.find(_CLOSE, opening + len(_OPEN)) if opening >= 0 else -1
        if closing < 0:
            yield text[start:]
            return
        yield text[start:opening]
        yield text[opening + len(_OPEN) : closing]
        start = closing + len(_CLOSE)
