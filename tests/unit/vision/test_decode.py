"""Files become the pixels that a person would see, or an error in fixed words."""

from __future__ import annotations

import pytest
from PIL import Image, ImageFile, PngImagePlugin

from tests.unit.vision.hostile_files import FILES, MAX_PIXELS, TINY, Refused, Shows
from tgi_cli.vision.decode import FORMATS, decode, load_decoders
from tgi_cli.vision.errors import MediaError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")


@pytest.fixture(autouse=True, scope="module")
def decoders() -> None:
    load_decoders()


def check(image: Image.Image, expected: Shows) -> None:
    assert image.mode == "RGB"
    assert image.size == expected.size
    for place, colour in expected.pixels.items():
        found = image.getpixel(place)
        assert isinstance(found, tuple)
        differences = [abs(a - b) for a, b in zip(found, colour, strict=True)]
        assert max(differences) <= expected.difference, (place, found, colour)


def image_or_none(data: bytes) -> Image.Image | None:
    """The image, or None if it is refused in our words; any other error fails."""
    try:
        return decode(data, MAX_PIXELS)
    except MediaError as error:
        if not str(error).startswith("invalid image: "):
            raise
        return None


def test_the_corpus_is_large() -> None:
    assert len(FILES) >= 80
    assert sum(isinstance(expected, Refused) for _, expected in FILES.values()) >= 40


@pytest.mark.parametrize("name", FILES)
def test_each_file_has_its_answer(name: str) -> None:
    make, expected = FILES[name]
    data = make()
    if isinstance(expected, Shows):
        check(decode(data, MAX_PIXELS), expected)
        return
    with pytest.raises(MediaError) as caught:
        decode(data, MAX_PIXELS)
    assert (str(caught.value), caught.value.code) == (expected.text, expected.code)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("name", FILES)
def test_any_prefix_is_an_image_or_refused(name: str) -> None:
    data = FILES[name][0]()
    for share in (0.02, 0.1, 0.3, 0.5, 0.8, 0.95):
        image = image_or_none(data[: int(len(data) * share)])
        assert image is None or image.mode == "RGB"


@pytest.mark.parametrize("name", ["png", "jpeg", "gif animated", "webp", "tiff compressed"])
def test_any_flipped_byte_is_an_image_or_refused(name: str) -> None:
    data = FILES[name][0]()
    for position in range(0, len(data), max(1, len(data) // 150)):
        flipped = data[:position] + bytes((data[position] ^ 0xFF,)) + data[position + 1 :]
        image = image_or_none(flipped)
        assert image is None or image.width * image.height <= MAX_PIXELS


def test_the_size_is_checked_before_pixels_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    bombs = [
        make()
        for make, expected in FILES.values()
        if isinstance(expected, Refused) and expected.code == "image_too_large"
    ]
    assert len(bombs) >= 10
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded"))
    for bomb in bombs:
        with pytest.raises(MediaError, match="more than the maximum"):
            decode(bomb, MAX_PIXELS)


def test_only_named_formats_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    real = Image.open

    def watched(file: object, mode: str = "r", formats: object = None) -> object:
        asked.append(formats)
        return real(file, mode, formats)  # type: ignore[arg-type]

    monkeypatch.setattr(Image, "open", watched)
    decode(TINY, MAX_PIXELS)
    assert asked == [FORMATS]


@pytest.mark.parametrize("step", ["load", "getexif"])
def test_too_little_memory_is_no_damage(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(PngImagePlugin.PngImageFile, step, fail)
    with pytest.raises(MemoryError):
        decode(TINY, MAX_PIXELS)
