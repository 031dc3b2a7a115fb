"""Files that claim to be images, each with what a server must make of it.

Made here, byte by byte where no library writes them. :data:`FILES` has them by name.
"""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from PIL import Image

MAX_PIXELS = 1_000_000
"""What the tests allow, so that bombs are small."""

Colour = tuple[int, int, int]
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
WHITE, BLACK, GREY = (255, 255, 255), (0, 0, 0), (128, 128, 128)


@dataclass(frozen=True)
class Shows:
    """The size of an image, and some of its pixels, up to a difference in each channel."""

    size: tuple[int, int]
    pixels: Mapping[tuple[int, int], Colour] = field(default_factory=dict)
    difference: int = 0


@dataclass(frozen=True)
class Refused:
    """The text that the client gets, and OpenAI's code."""

    text: str
    code: str = "invalid_image"


NOT_AN_IMAGE = Refused(
    "invalid image: it is not a PNG, JPEG, WebP, GIF or TIFF file", "unsupported_image_media_type"
)
DAMAGED = Refused("invalid image: the file is damaged or cut off")
STRANGE_PIXELS = Refused("invalid image: its pixels have an unsupported format")
NO_PIXELS = Refused("invalid image: it has no pixels")


def too_large(width: int, height: int) -> Refused:
    return Refused(
        f"invalid image: it has {width} x {height} pixels, more than the maximum of {MAX_PIXELS}",
        "image_too_large",
    )


# --- PNG (https://www.w3.org/TR/png-3/) ---


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    width: int, height: int, depth: int, kind: int, rows: bytes, *before: bytes, raw: bool = False
) -> bytes:
    """A file of rows, each behind its filter's byte; ``before`` are chunks ahead of them."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    data = chunk(b"IDAT", rows if raw else zlib.compress(rows, 9))
    return b"".join((b"\x89PNG\r\n\x1a\n", head, *before, data, chunk(b"IEND")))


RGB, PALETTE, GREYS, GREYS_ALPHA, RGB_ALPHA = 2, 3, 0, 4, 6
TINY = png(2, 1, 8, RGB, b"\0" + bytes(RED) + bytes(BLUE))
SHOWN = Shows((2, 1), {(0, 0): RED, (1, 0): BLUE})


def sixteen(*values: int) -> bytes:
    return struct.pack(f">{len(values)}H", *values)


@cache
def bit_bomb(side: int) -> bytes:
    """A file of some kilobytes with ``side`` squared pixels."""
    return png(side, side, 1, GREYS, (b"\0" + bytes(side // 8)) * side)


@cache
def text_bomb(kind: bytes) -> bytes:
    """A compressed text, or profile, of 100 MB in 100 KB."""
    packed = zlib.compress(bytes(100 << 20), 9)
    return png(2, 1, 8, RGB, b"\0" + bytes(RED) + bytes(BLUE), chunk(kind, b"x\0\0" + packed))


# --- what Pillow writes ---


def written(image: Image.Image, form: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def corner(mode: str = "RGB", size: tuple[int, int] = (48, 32)) -> Image.Image:
    """White, with its upper left quarter red."""
    image = Image.new("RGB", size, WHITE)
    image.paste(RED, (0, 0, size[0] // 2, size[1] // 2))
    return image.convert(mode)


def corner_shown(x: int = 8, y: int = 8, size: tuple[int, int] = (48, 32)) -> Shows:
    """The corner's red at a pixel, and white at the opposite one."""
    other = size[0] - 1 - x, size[1] - 1 - y
    return Shows(size, {(x, y): RED, other: WHITE}, 40)


def plain(colour: Any, mode: str = "RGB", size: tuple[int, int] = (16, 16)) -> Image.Image:
    return Image.new(mode, size, colour)


def turned(form: str, orientation: int) -> bytes:
    """A corner with EXIF's orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return written(corner(), form, exif=exif.tobytes())


# Where the red corner of 48 x 32 pixels is seen, by EXIF's orientation.
TURNED = {
    1: corner_shown(8, 8),
    2: corner_shown(40, 8),
    3: corner_shown(40, 24),
    4: corner_shown(8, 24),
    5: corner_shown(8, 8, (32, 48)),
    6: corner_shown(24, 8, (32, 48)),
    7: corner_shown(24, 40, (32, 48)),
    8: corner_shown(8, 40, (32, 48)),
}


def animated(form: str, **options: Any) -> bytes:
    """Red, then green, then blue."""
    first, *rest = (plain(colour) for colour in (RED, GREEN, BLUE))
    return written(first, form, save_all=True, append_images=rest, **options)


def with_exif(data: bytes) -> bytes:
    """A JPEG file with these bytes as its EXIF."""
    jpeg = written(corner(), "JPEG", quality=95)
    body = b"Exif\0\0" + data
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + jpeg[2:]


def jpeg_head(width: int, height: int) -> bytes:
    """A JPEG file of which only the header exists."""
    jpeg = bytearray(written(plain(RED), "JPEG"))
    start = jpeg.index(b"\xff\xc0") + 5
    jpeg[start : start + 4] = struct.pack(">HH", height, width)
    return bytes(jpeg)


# --- GIF (https://www.w3.org/Graphics/GIF/spec-gif89a.txt) ---


def gif_head(width: int, height: int, frame: int = 16) -> bytes:
    """A GIF file whose screen, and the sides of whose frame, are as its header says."""
    gif = bytearray(written(plain(RED), "GIF"))
    gif[6:10] = struct.pack("<HH", width, height)
    start = gif.index(b"\x2c" + struct.pack("<HHHH", 0, 0, 16, 16)) + 5
    gif[start : start + 4] = struct.pack("<HH", frame, frame)
    return bytes(gif)


def gif_with_hole() -> bytes:
    image = Image.new("P", (16, 16), 1)
    image.putpalette(bytes((*BLACK, *RED)))
    image.paste(0, (0, 0, 8, 16))
    return written(image, "GIF", transparency=0)


# --- WebP (RFC 9649) ---


def riff(kind: bytes, data: bytes) -> bytes:
    body = b"WEBP" + kind + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_canvas(width: int, height: int) -> bytes:
    sides = b"".join(struct.pack("<I", side - 1)[:3] for side in (width, height))
    return riff(b"VP8X", struct.pack("<I", 2) + sides)


def webp_lossless_head(width: int, height: int) -> bytes:
    return riff(b"VP8L", b"\x2f" + struct.pack("<I", width - 1 | height - 1 << 14) + bytes(9))


def webp_lossy_head(width: int, height: int) -> bytes:
    return riff(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", width, height) + bytes(4))


# --- TIFF (TIFF 6.0) ---


def tiff(entries: Iterable[tuple[int, int, int, int]], next_folder: int = 0) -> bytes:
    """A file of one folder; entries are tag, type, count and value, in order."""
    entries = list(entries)
    folder = struct.pack("<H", len(entries))
    folder += b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<I", 8) + folder + struct.pack("<I", next_folder)


def tiff_grey(width: int, height: int, next_folder: int = 0, count: int = 1) -> bytes:
    """One uncompressed strip of grey pixels, which begins at the file's first byte."""
    short, long = 3, 4
    return tiff(
        [
            (256, long, 1, width),
            (257, long, 1, height),
            (258, short, 1, 8),
            (259, short, 1, 1),
            (262, short, 1, 1),
            (273, long, count, 0),
            (277, short, 1, 1),
            (278, long, 1, height),
            (279, long, 1, width * height & 0xFFFFFFFF),
        ],
        next_folder,
    )


# --- files in two formats, and in none ---


def png_and_zip() -> bytes:
    stream = io.BytesIO()
    stream.write(TINY)
    with zipfile.ZipFile(stream, "a") as archive:
        archive.writestr("evil.html", "<script>alert(1)</script>")
    return stream.getvalue()


def jpeg_with_script() -> bytes:
    jpeg = written(corner(), "JPEG", quality=95)
    script = b"<script>alert(1)</script>" * 100
    return jpeg[:2] + b"\xff\xfe" + struct.pack(">H", len(script) + 2) + script + jpeg[2:]


def cut(data: bytes, share: float = 0.6) -> bytes:
    return data[: int(len(data) * share)]


def noise(form: str, **options: Any) -> bytes:
    """An image that does not compress, so that a cut is in its pixels."""
    image = Image.effect_noise((64, 64), 90).convert("RGB")
    return written(image, form, **options)


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes((data[position] ^ 0xFF,)) + data[position + 1 :]


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(/etc/passwd) run\n"

FILES: dict[str, tuple[Callable[[], bytes], Shows | Refused]] = {
    # pixels of all kinds
    "png": (lambda: TINY, SHOWN),
    "png 1x1": (lambda: png(1, 1, 8, RGB, b"\0" + bytes(GREEN)), Shows((1, 1), {(0, 0): GREEN})),
    "png 300x1": (lambda: written(plain(BLUE, size=(300, 1)), "PNG"), Shows((300, 1))),
    "png 1x300": (lambda: written(plain(BLUE, size=(1, 300)), "PNG"), Shows((1, 300))),
    "png of one bit": (
        lambda: png(8, 1, 1, GREYS, b"\0\x80"),
        Shows((8, 1), {(0, 0): WHITE, (1, 0): BLACK}),
    ),
    "png of 16-bit grey": (
        lambda: png(3, 1, 16, GREYS, b"\0" + sixteen(0x8000, 0x00FF, 0xFFFF)),
        Shows((3, 1), {(0, 0): GREY, (1, 0): BLACK, (2, 0): WHITE}),
    ),
    "png of 16-bit colours": (
        lambda: png(1, 1, 16, RGB, b"\0" + sixteen(0x8000, 0x8000, 0x8000)),
        Shows((1, 1), {(0, 0): GREY}),
    ),
    "jpeg": (lambda: written(corner(), "JPEG", quality=95), corner_shown()),
    "jpeg of grey": (lambda: written(plain(128, "L"), "JPEG"), Shows((16, 16), {(8, 8): GREY}, 2)),
    "jpeg progressive": (
        lambda: written(corner(), "JPEG", quality=95, progressive=True),
        corner_shown(),
    ),
    "jpeg of CMYK": (
        lambda: written(plain((0, 255, 255, 0), "CMYK"), "JPEG", quality=95),
        Shows((16, 16), {(8, 8): RED}, 40),
    ),
    "webp": (lambda: written(corner(), "WEBP", quality=95), corner_shown()),
    "webp lossless": (lambda: written(corner(), "WEBP", lossless=True), corner_shown()),
    "tiff": (lambda: written(corner(), "TIFF"), corner_shown()),
    "tiff compressed": (lambda: written(corner(), "TIFF", compression="tiff_lzw"), corner_shown()),
    "tiff of CMYK": (
        lambda: written(plain((0, 255, 255, 0), "CMYK"), "TIFF"),
        Shows((16, 16), {(8, 8): RED}, 40),
    ),
    "tiff of 16-bit grey": (
        lambda: written(plain(0x8000, "I;16"), "TIFF"),
        Shows((16, 16), {(8, 8): GREY}),
    ),
    "tiff of 32-bit grey": (lambda: written(plain(70_000, "I"), "TIFF"), STRANGE_PIXELS),
    "tiff of floats": (lambda: written(plain(0.5, "F"), "TIFF"), STRANGE_PIXELS),
    "tiff of LAB": (lambda: written(plain((50, 0, 0), "LAB"), "TIFF"), STRANGE_PIXELS),
    # transparency is on white
    "png with alpha": (
        lambda: png(2, 1, 8, RGB_ALPHA, b"\0" + bytes((*BLACK, 0, *RED, 255))),
        Shows((2, 1), {(0, 0): WHITE, (1, 0): RED}),
    ),
    "png half transparent": (
        lambda: png(1, 1, 8, RGB_ALPHA, b"\0" + bytes((*BLACK, 127))),
        Shows((1, 1), {(0, 0): GREY}, 1),
    ),
    "png of grey with alpha": (
        lambda: png(2, 1, 8, GREYS_ALPHA, b"\0" + bytes((0, 0, 0, 255))),
        Shows((2, 1), {(0, 0): WHITE, (1, 0): BLACK}),
    ),
    "png of grey with a key": (
        lambda: png(2, 1, 8, GREYS, b"\0\0\x80", chunk(b"tRNS", sixteen(0))),
        Shows((2, 1), {(0, 0): WHITE, (1, 0): GREY}),
    ),
    "png of 16-bit grey with a key": (
        lambda: png(2, 1, 16, GREYS, b"\0" + sixteen(1, 2), chunk(b"tRNS", sixteen(1))),
        Shows((2, 1), {(0, 0): WHITE, (1, 0): BLACK}),
    ),
    "png of colours with a key": (
        lambda: png(2, 1, 8, RGB, b"\0" + bytes((*BLACK, *RED)), chunk(b"tRNS", sixteen(0, 0, 0))),
        Shows((2, 1), {(0, 0): WHITE, (1, 0): RED}),
    ),
    "png of 16-bit colours with a key": (
        lambda: png(
            2,
            1,
            16,
            RGB,
            b"\0" + sixteen(0x8000, 0, 0, 0xFFFF, 0, 0),
            chunk(b"tRNS", sixteen(0x8000, 0, 0)),
        ),
        Shows((2, 1), {(0, 0): WHITE, (1, 0): RED}),
    ),
    "png of a palette with alpha": (
        lambda: png(
            2,
            1,
            8,
            PALETTE,
            b"\0\0\x01",
            chunk(b"PLTE", bytes((*BLACK, *RED))),
            chunk(b"tRNS", b"\0"),
        ),
        Shows((2, 1), {(0, 0): WHITE, (1, 0): RED}),
    ),
    "gif with a hole": (gif_with_hole, Shows((16, 16), {(4, 8): WHITE, (12, 8): RED})),
    "webp with alpha": (
        lambda: written(plain((0, 0, 0, 0), "RGBA"), "WEBP", lossless=True, exact=True),
        Shows((16, 16), {(8, 8): WHITE}),
    ),
    "tiff with alpha": (
        lambda: written(plain((0, 0, 0, 0), "RGBA"), "TIFF"),
        Shows((16, 16), {(8, 8): WHITE}),
    ),
    # of several frames the first
    "gif animated": (lambda: animated("GIF"), Shows((16, 16), {(8, 8): RED}, 2)),
    "png animated": (lambda: animated("PNG"), Shows((16, 16), {(8, 8): RED})),
    "webp animated": (lambda: animated("WEBP", lossless=True), Shows((16, 16), {(8, 8): RED})),
    "tiff of pages": (lambda: animated("TIFF"), Shows((16, 16), {(8, 8): RED})),
    "jpeg of pictures (MPO)": (lambda: animated("MPO"), Shows((16, 16), {(8, 8): RED}, 40)),
    # turned as EXIF says
    **{f"jpeg turned {n}": (partial(turned, "JPEG", n), shown) for n, shown in TURNED.items()},
    "jpeg turned 9": (partial(turned, "JPEG", 9), corner_shown()),
    "png turned 6": (partial(turned, "PNG", 6), TURNED[6]),
    "webp turned 3": (partial(turned, "WEBP", 3), TURNED[3]),
    "tiff turned 6": (
        lambda: written(corner(), "TIFF", tiffinfo={0x0112: 6}),
        TURNED[6],
    ),
    "jpeg with damaged EXIF": (lambda: with_exif(b"II*\0\xff\xff\xff\xff"), corner_shown()),
    "jpeg with EXIF of noise": (lambda: with_exif(bytes(range(256)) * 8), corner_shown()),
    "jpeg with EXIF in a loop": (
        lambda: with_exif(tiff([(0x8769, 4, 1, 8), (0x0112, 3, 1, 1)], 8)),
        corner_shown(),
    ),
    # formats that are not taken, whatever they contain
    "nothing but zeros": (lambda: bytes(100_000), NOT_AN_IMAGE),
    "text": (lambda: b"hello world " * 100, NOT_AN_IMAGE),
    "html": (lambda: b"<html><img src=x></html>", NOT_AN_IMAGE),
    "svg": (lambda: SVG, NOT_AN_IMAGE),
    "eps": (lambda: EPS, NOT_AN_IMAGE),
    "pdf": (lambda: b"%PDF-1.7\n" + bytes(100), NOT_AN_IMAGE),
    "bmp": (lambda: written(corner(), "BMP"), NOT_AN_IMAGE),
    "ico": (lambda: written(corner(), "ICO"), NOT_AN_IMAGE),
    "ppm": (lambda: written(corner(), "PPM"), NOT_AN_IMAGE),
    "tga": (lambda: written(corner(), "TGA"), NOT_AN_IMAGE),
    "png in gzip": (lambda: gzip.compress(TINY), NOT_AN_IMAGE),
    "a sound": (lambda: b"RIFF" + struct.pack("<I", 100) + b"WAVEfmt " + bytes(90), NOT_AN_IMAGE),
    "signature of a png alone": (lambda: TINY[:8], DAMAGED),
    # bombs
    "png of 10^10 pixels": (
        lambda: png(100_000, 100_000, 8, RGB, b"\0"),
        too_large(100_000, 100_000),
    ),
    "png of the largest size": (
        lambda: png(0x7FFFFFFF, 0x7FFFFFFF, 8, RGB, b"\0"),
        too_large(0x7FFFFFFF, 0x7FFFFFFF),
    ),
    "png of bits": (lambda: bit_bomb(8000), too_large(8000, 8000)),
    "png a pixel too large": (
        lambda: written(plain(0, "L", (MAX_PIXELS + 1, 1)), "PNG"),
        too_large(MAX_PIXELS + 1, 1),
    ),
    "png as large as allowed": (
        lambda: written(plain(0, "L", (1000, MAX_PIXELS // 1000)), "PNG"),
        Shows((1000, 1000), {(999, 999): BLACK}),
    ),
    "png with a text of 100 MB": (partial(text_bomb, b"zTXt"), DAMAGED),
    "png with a profile of 100 MB": (partial(text_bomb, b"iCCP"), DAMAGED),
    "jpeg of 65535 x 65535": (lambda: jpeg_head(65535, 65535), too_large(65535, 65535)),
    "gif of 65535 x 65535": (lambda: gif_head(65535, 65535), too_large(65535, 65535)),
    "gif with a frame beyond its screen": (
        lambda: gif_head(1, 1, frame=65535),
        too_large(65535, 65535),
    ),
    "webp of 2^24 x 2^8": (lambda: webp_canvas(1 << 24, 256), too_large(1 << 24, 256)),
    "webp lossless of 2^28": (
        lambda: webp_lossless_head(1 << 14, 1 << 14),
        too_large(1 << 14, 1 << 14),
    ),
    "webp lossy of 2^28": (lambda: webp_lossy_head(16383, 16383), too_large(16383, 16383)),
    "tiff of 2^60": (lambda: tiff_grey(1 << 30, 1 << 30), too_large(1 << 30, 1 << 30)),
    # damaged
    "png cut off": (lambda: cut(noise("PNG")), DAMAGED),
    "jpeg cut off": (lambda: cut(noise("JPEG")), DAMAGED),
    "gif cut off": (lambda: cut(noise("GIF")), DAMAGED),
    "webp cut off": (lambda: cut(noise("WEBP", lossless=True)), DAMAGED),
    "tiff cut off": (lambda: cut(noise("TIFF", compression="tiff_lzw")), DAMAGED),
    "png without pixels": (lambda: png(2, 1, 8, RGB, b""), DAMAGED),
    "png of noise": (lambda: png(2, 1, 8, RGB, bytes(range(100)), raw=True), DAMAGED),
    "png of width 0": (lambda: png(0, 1, 8, RGB, b"\0"), DAMAGED),
    "gif of height 0": (lambda: gif_head(16, 0), Shows((16, 16), {(8, 8): RED})),
    "webp of width 0": (lambda: webp_lossy_head(0, 5), NO_PIXELS),
    "png with a wrong sum": (lambda: flipped(TINY, 18), DAMAGED),
    "tiff with a folder in a loop": (
        lambda: tiff_grey(4, 4, next_folder=8),
        Shows((4, 4), {(0, 0): (73, 73, 73)}),
    ),
    "tiff with 2^31 strips": (lambda: tiff_grey(4, 4, count=1 << 31), DAMAGED),
    # two formats in one
    "png and zip": (png_and_zip, SHOWN),
    "jpeg with a script": (jpeg_with_script, corner_shown()),
    "gif that is a script": (lambda: b"GIF89a/*" + b"*/=1;alert(1)//" * 9, DAMAGED),
}
