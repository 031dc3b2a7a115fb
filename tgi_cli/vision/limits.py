"""What images a server takes, and where from."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from tgi_cli.config.settings import default

_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Limits of images; names and defaults are those of the settings.

    Attributes:
        media_fetch: fetch images from http and https URLs; allowed domains imply it.
        allowed_media_domains: the only hosts to fetch from: ``HOST`` or ``HOST:PORT``. Default:
            all, on ports 80 and 443.
        allow_private_media: also fetch from addresses of private networks and of this
            machine.
        allowed_local_media_path: the folder below which ``file:`` URLs are read. Default: none are.
        media_fetch_timeout: seconds for one image, redirects included.
        max_image_fetch_size: bytes of an image's file, fetched or not.
        max_image_pixels: width times height of an image.
        max_images: images of one prompt.
        image_workers: processes that decode and preprocess images.
    """

    media_fetch: bool = default("media_fetch")
    allowed_media_domains: tuple[str, ...] = ()
    allow_private_media: bool = default("allow_private_media")
    allowed_local_media_path: Path | None = None
    media_fetch_timeout: float = default("media_fetch_timeout")
    max_image_fetch_size: int = default("max_image_fetch_size")
    max_image_pixels: int = default("max_image_pixels")
    max_images: int = default("max_images")
    image_workers: int = default("image_workers")

    @property
    def fetches(self) -> bool:
        """Whether http and https URLs are fetched at all."""
        return self.media_fetch or bool(self.allowed_media_domains)


def parse_domain(word: str) -> tuple[str, int | None]:
    """The host and the port, if any, of an allowed domain: ``HOST`` or ``HOST:PORT``.

    IPv6 addresses are in brackets. Raises ValueError.
    """
    host, colon, port = word.lower().rpartition(":")
    if not colon or (word.startswith("[") and word.endswith("]")):
        host, port = word.lower(), ""
    if port and not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 1 << 16):
        raise ValueError("its port is not a number from 1 to 65535")
    if host.startswith("[") and host.endswith("]"):
        return str(ipaddress.IPv6Address(host[1:-1])), int(port) if port else None
    if not _NAME.fullmatch(host) or word.endswith(":"):
        raise ValueError("it is not a host name, without scheme, path and wildcards")
    return host, int(port) if port else None
