"""Images in requests: parts of messages, and TGI's Markdown and MindIE's lists in ``inputs``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tgi_cli.router.api.schemas.openai import ContentPart, ImageUrl
from tgi_cli.router.bounds import PARTS
from tgi_cli.router.generation.prompt_images import PromptImageLoader
from tgi_cli.router.http import errors
from tgi_cli.text.images import ImagePart, markdown_images

IMAGE_TYPES = ("image_url", "input_image", "image")
"""Types of parts in chats, in responses and in messages, all translated into chats."""
_URL = re.compile(r"(data|https?):", re.ASCII | re.IGNORECASE)
_BASE64 = ("iVBOR", "/9j/", "R0lGOD", "UklGR", "SUkq", "TU0AK")
"""How PNG, JPEG, GIF, WebP and TIFF (of either byte order) begin in base64."""


def image_part(part: ContentPart, param: str) -> ImagePart:
    """The image of a part, which frees it: bodies live as long as their answers.

    Raises ApiError.
    """
    url, detail = part.image_url, part.detail
    if isinstance(url, ImageUrl):
        detail = url.detail
        url = url.url
    if not url:
        raise errors.validation(f"a part of type `{part.type}` needs an `image_url`", param)
    part.image_url = None
    return ImagePart(url, detail)


def native_prompt(
    inputs: str | Sequence[ContentPart], images: PromptImageLoader
) -> tuple[str, list[ImagePart]]:
    """The prompt of a request of TGI's API, with a placeholder for each of its images.

    For models without images, Markdown is text.

    Raises:
        ApiError: A part of a list, or the number of images, is not supported.
    """
    if isinstance(inputs, str):
        if not images.expected or "![](" not in inputs:
            return inputs, []
        pieces: list[str | ImagePart] = _markdown(inputs, images)
    else:
        pieces = [_listed(part, images) for part in inputs]
    found = [piece for piece in pieces if isinstance(piece, ImagePart)]
    if not found:
        return "".join(piece for piece in pieces if isinstance(piece, str)), []
    images.check(found, "inputs")
    placeholder = images.image_format.text
    text = "".join(piece if isinstance(piece, str) else placeholder for piece in pieces)
    return text, found


def _markdown(text: str, images: PromptImageLoader) -> list[str | ImagePart]:
    pieces: list[str | ImagePart] = []
    for index, piece in enumerate(markdown_images(text)):
        if index % 2 == 0:
            pieces.append(piece)
        elif images.supported:
            pieces.append(ImagePart(piece))
        elif _URL.match(piece):
            images.require("image", "inputs")
        else:
            pieces.append(f"![]({piece})")
        if index > 2 * PARTS:
            raise errors.validation(f"`inputs` has more than {PARTS} images", "inputs")
    return pieces


def _listed(part: ContentPart, images: PromptImageLoader) -> str | ImagePart:
    """A part of MindIE's list, whose images may also be a path or base64 alone."""
    if part.type == "text" and part.text is not None:
        return part.text
    if part.type not in IMAGE_TYPES:
        raise errors.validation(
            f"content of type `{part.type}` is not supported by this model", "inputs"
        )
    images.require(part.type, "inputs")
    image = image_part(part, "inputs")
    assert isinstance(image.source, str)
    if image.source.startswith(_BASE64):
        return ImagePart(f"data:;base64,{image.source}", image.detail)
    if image.source.startswith("/"):
        return ImagePart(f"file://{image.source}", image.detail)
    return image
