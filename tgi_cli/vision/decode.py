"""Files of images to pixels, as a person would see them.

Runs in a child process of bounded time and memory (:mod:`tgi_cli.vision.image_process`): decoders
are written in C and meet files of strangers. The size is known from the header before pixels are
decoded. What a viewer shows is what a model gets: of an animation the first frame, turned as EXIF
says, transparency on white. Otherwise a file could show people one image and the model another.
"""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING

from tgi_cli.vision.errors import MediaError, unreadable

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "TIFF")
_ORIENTATION = 0x0112
"""Tag of EXIF (CIPA DC-008, 4.6.5)."""
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_CONVERTIBLE = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")
_SIGNATURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"II*\0", b"MM\0*")
_DAMAGED = "the file is damaged or cut off"
_WHITE = 255


def load_decoders() -> None:
    """Import the decoders of :data:`FORMATS`, which Pillow does at the first image otherwise.

    Raises ImportError without Pillow.
    """
    from PIL import (  # noqa: F401
        GifImagePlugin,
        Image,
        JpegImagePlugin,
        MpoImagePlugin,
        PngImagePlugin,
        TiffImagePlugin,
        WebPImagePlugin,
    )

    Image.MAX_IMAGE_PIXELS = None  # ours is checked in its place


def decode(data: bytes, max_pixels: int) -> Image.Image:
    """The image in a file, in RGB.

    Raises:
        MediaError: It is none of :data:`FORMATS`, has more than ``max_pixels`` pixels, or is
            damaged.
        MemoryError: The process may not take as much memory.
    """
    from PIL import Image, UnidentifiedImageError

    canvas = _webp_canvas(data)
    if canvas is not None:  # its decoder allocates the canvas when it opens the file
        _check_size(*canvas, max_pixels)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(*image.size, max_pixels)
            if image.mode not in (*_CONVERTIBLE, *_SIXTEEN_BITS):
                raise unreadable("its pixels have an unsupported format")
            image.load()
            return _upright(_rgb(image), _orientation(image))
    except (MediaError, MemoryError):
        raise
    except UnidentifiedImageError:
        if _is_claimed(data):
            raise unreadable(_DAMAGED) from None
        raise unreadable(
            "it is not a PNG, JPEG, WebP, GIF or TIFF file", "unsupported_image_media_type"
        ) from None
    except Exception:  # decoders raise anything, in words that may have addresses of memory
        raise unreadable(_DAMAGED) from None


def _is_claimed(data: bytes) -> bool:
    """Whether a file begins as one of the formats does."""
    return data.startswith(_SIGNATURES) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise unreadable("it has no pixels")
    if width * height > max_pixels:
        raise unreadable(
            f"it has {width} x {height} pixels, more than the maximum of {max_pixels}",
            "image_too_large",
        )


def _webp_canvas(data: bytes) -> tuple[int, int] | None:
    """Width and height of a WebP file (RFC 9649), or None if it is not one."""
    kind = data[12:16]
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    if kind == b"VP8X":
        width, width_high, height, height_high = struct.unpack_from("<HBHB", data, 24)
        return 1 + (width_high << 16 | width), 1 + (height_high << 16 | height)
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    return None


def _rgb(image: Image.Image) -> Image.Image:
    """The pixels of a loaded image in RGB, transparent ones on white."""
    from PIL import Image

    if image.mode in _SIXTEEN_BITS:
        return _eight_bits(image)
    key = image.info.get("transparency")
    if image.mode == "RGB" and isinstance(key, tuple) and max(key) > 255:
        # Of 16 bits a channel, of which Pillow keeps the upper half.
        image.info["transparency"] = tuple(value >> 8 for value in key)
    if not image.has_transparency_data:
        return image.convert("RGB")
    pixels = image.convert("RGBA")
    paper = Image.new("RGBA", image.size, (_WHITE, _WHITE, _WHITE, 255))
    paper.alpha_composite(pixels)
    return paper.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """The upper halves of 16-bit grey values; Pillow's conversion would clip them at 255."""
    import numpy
    from PIL import Image

    values = numpy.asarray(image)
    upper = (values >> 8).astype(numpy.uint8)
    key = image.info.get("transparency")
    if isinstance(key, int):
        upper[values == key] = _WHITE
    return Image.fromarray(upper).convert("RGB")


def _orientation(image: Image.Image) -> int:
    """The orientation that EXIF says, 1 if it is upright or EXIF is damaged, as in browsers.

    TIFF files have been turned when they were loaded.
    """
    if image.format == "TIFF":
        return 1
    try:
        found = image.getexif().get(_ORIENTATION)
    except MemoryError:
        raise
    except Exception:  # Pillow raises any kind for damaged EXIF, which is ignored
        return 1
    return found if isinstance(found, int) else 1


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    """Turn an image. Not ``ImageOps.exif_transpose``, which fails on EXIF that it cannot write."""
    from PIL.Image import Transpose

    ways = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    way = ways.get(orientation)
    return image if way is None else image.transpose(way)
