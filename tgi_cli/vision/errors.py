"""Errors of images that cannot be fetched or read."""

from __future__ import annotations

from tgi_cli.vision.images import ImageError


class MediaError(ImageError):
    """An image that cannot be fetched, decoded or processed.

    The message is for clients: fixed words and numbers, never those of a library or another
    server.

    Attributes:
        code: OpenAI's code of such an error
            (https://platform.openai.com/docs/api-reference/responses/object, ``error.code``).
        unavailable: The server is busy or at fault; the same request may succeed later.
    """

    def __init__(
        self, message: str, code: str = "invalid_image", *, unavailable: bool = False
    ) -> None:
        super().__init__(message)
        self.code = code
        self.unavailable = unavailable


def not_fetched(cause: str) -> MediaError:
    """An image behind a URL that cannot be fetched, in TGI's words."""
    return MediaError(f"Could not fetch image: {cause}", "failed_to_download_image")


def bad_url(cause: str) -> MediaError:
    """A source that is no usable URL, in TGI's words."""
    return MediaError(f"invalid image content: {cause}", "invalid_image_url")


def too_many_bytes(size: int | None, most: int) -> MediaError:
    """A file that is too large, in TGI's words; ``size`` is None where it is not known."""
    given = "Image size" if size is None else f"Image size {size} bytes"
    return MediaError(
        f"{given} exceeds maximum allowed size of {most} bytes", "image_file_too_large"
    )


def unreadable(cause: str, code: str = "invalid_image") -> MediaError:
    """A file that cannot be decoded, in TGI's words."""
    return MediaError(f"invalid image: {cause}", code)
