"""Images in the blocks of Anthropic's messages, as parts of a chat's.

https://docs.anthropic.com/en/docs/build-with-claude/vision
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from tgi_cli.router.api.schemas.messages import Block
from tgi_cli.router.api.schemas.openai import ContentPart
from tgi_cli.router.http import errors


def image_of(place: str, block: Block) -> ContentPart:
    """The image of a block, which frees it: bodies live as long as their answers.

    Raises ApiError for sources that this server does not have.
    """
    source = block.source if isinstance(block.source, dict) else {}
    kind, url = source.get("type"), source.get("url")
    data, media_type = source.get("data"), source.get("media_type")
    if kind == "file":
        raise errors.validation(
            f"{place}: the source of an image may not be a `file_id`: this server keeps no files",
            "messages",
        )
    if kind == "base64" and isinstance(data, str) and isinstance(media_type, str):
        url = f"data:{media_type};base64,{data}"
    elif kind != "url" or not isinstance(url, str):
        raise errors.validation(
            f"{place}: the source of an image must be of type `base64` with `media_type` and "
            "`data`, or of type `url` with `url`",
            "messages",
        )
    block.source = None
    return ContentPart(type="image", image_url=url)


def joined(pieces: Sequence[str | ContentPart]) -> str | list[ContentPart]:
    """The content of a message: lines of text, or parts if there are images between them."""
    parts: list[ContentPart] = []
    for is_text, group in groupby(pieces, lambda piece: isinstance(piece, str)):
        if is_text:
            text = "\n".join(piece for piece in group if isinstance(piece, str) and piece)
            parts += [ContentPart(type="text", text=text)] if text else []
        else:
            parts += [piece for piece in group if isinstance(piece, ContentPart)]
    if all(part.type == "text" for part in parts):
        return "".join(part.text or "" for part in parts)
    return parts
