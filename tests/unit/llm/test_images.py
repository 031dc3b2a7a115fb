"""Images of prompts and conversations of the Python API, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tools import fake_vision
from tests.tools.fake_vision import IMAGE, FakeImages, data_url, file_of
from tests.unit.model_server.fakes import INFO
from tgi_cli.llm import images as llm_images
from tgi_cli.llm.images import ModelImages, image_part, marked_text
from tgi_cli.llm.options import Prompt, read_prompts
from tgi_cli.text.bundle import TextBundle
from tgi_cli.text.images import ImageMarks, ImagePart
from tgi_cli.vision.load import Vision

INFO_SEES = replace(INFO, vocab_size=400, vision=True, max_image_rows=64)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextBundle:
    return fake_vision.bundle(tmp_path_factory.mktemp("sees"))


@pytest.fixture
def seen() -> FakeImages:
    return FakeImages()


@pytest.fixture
def images(
    text: TextBundle, seen: FakeImages, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[ModelImages]:
    found = fake_vision.vision(text, seen)
    monkeypatch.setattr(llm_images, "load_vision", lambda *_: found)
    model = ModelImages(tmp_path, text, INFO_SEES)
    yield model
    model.close()


def read(prompts: Any, text: TextBundle, images: ModelImages) -> list[Prompt]:
    return read_prompts(prompts, text.tokenizer, True, INFO_SEES, images)


def shown(prompt: Prompt, text: TextBundle) -> str:
    return text.tokenizer.decode(prompt.ids, skip_special_tokens=False)


def test_a_prompt_has_its_images_where_the_placeholders_are(
    text: TextBundle, images: ModelImages
) -> None:
    asked = {"prompt": f"a {IMAGE} b {IMAGE}", "images": [file_of(3), file_of(2)]}
    (found,) = read(asked, text, images)
    assert shown(found, text) == f"<|begin|>a [{IMAGE * 3}] b [{IMAGE * 2}]"
    assert found.text == asked["prompt"]
    assert [image.num_rows for image in found.images] == [3, 2]


def test_without_placeholders_images_are_in_front(text: TextBundle, images: ModelImages) -> None:
    (found,) = read({"prompt": "a", "images": [file_of(1), file_of(2)]}, text, images)
    assert shown(found, text) == f"<|begin|>[{IMAGE}][{IMAGE * 2}]a"


def test_prompts_of_all_kinds_keep_their_order(text: TextBundle, images: ModelImages) -> None:
    pictured = {"prompt": "b", "images": file_of(2)}
    found = read(["a", pictured, [5, 6], {"prompt": "c", "images": []}], text, images)
    assert [prompt.text for prompt in found] == ["a", "b", None, "c"]
    assert [len(prompt.images) for prompt in found] == [0, 1, 0, 0]
    assert found[3].ids == tuple(text.tokenizer.encode("c"))


def test_prompts_may_be_read_within_an_event_loop(text: TextBundle, images: ModelImages) -> None:
    async def notebook() -> Prompt:
        return read({"prompt": "a", "images": [file_of(1)]}, text, images)[0]

    assert asyncio.run(notebook()).images


@pytest.mark.parametrize(
    ("prompt", "error", "cause"),
    [
        ({"prompt": "a", "images": [b"nothing"]}, ValueError, "an image of prompt 0: invalid"),
        ({"prompt": f"{IMAGE}{IMAGE}", "images": [file_of(1)]}, ValueError, "2 placeholders"),
        ({"prompt": "a", "images": [5]}, TypeError, "PIL image, bytes or a path"),
        ({"prompt": "a", "image": file_of(1)}, TypeError, "keys"),
        ({"images": [file_of(1)]}, TypeError, "keys"),
        ({"prompt": "a", "images": ["/no/such/file.png"]}, OSError, "no/such/file"),
        ({"prompt": "a", "images": ["http://example.org/a.png"]}, ValueError, "not fetch"),
    ],
)
def test_invalid_prompts(
    text: TextBundle, images: ModelImages, prompt: Any, error: type[Exception], cause: str
) -> None:
    with pytest.raises(error, match=cause):
        read(prompt, text, images)


def test_a_model_without_images_says_why(
    text: TextBundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for vision, cause in ((Vision(), "it takes text only"), (Vision(reason="no Pillow"), "Pillow")):
        monkeypatch.setattr(llm_images, "load_vision", lambda *_, found=vision: found)
        model = ModelImages(tmp_path, text, INFO_SEES)
        with pytest.raises(ValueError, match=cause):
            read({"prompt": "a", "images": [file_of(1)]}, text, model)
        assert read({"prompt": "a", "images": []}, text, model)[0].images == ()
        model.close()


def test_closing_ends_the_processes(
    text: TextBundle, images: ModelImages, seen: FakeImages
) -> None:
    read({"prompt": "a", "images": [file_of(1)]}, text, images)
    images.close()
    assert seen.closed


class TestImagePart:
    def test_bytes_paths_and_urls(self, tmp_path: Path) -> None:
        path = tmp_path / "a.png"
        path.write_bytes(b"file")
        for source in (b"file", path, str(path)):
            assert image_part(source) == ImagePart(b"file")
        assert image_part(bytearray(b"file"), "low") == ImagePart(b"file", "low")
        assert image_part(data_url(1)) == ImagePart(data_url(1))

    def test_pil_images_keep_their_pixels(self) -> None:
        pil = pytest.importorskip("PIL.Image")
        import io

        for mode in ("RGB", "L", "RGBA", "1", "CMYK"):
            image = pil.new(mode, (3, 2), 1 if mode in ("L", "1") else tuple([7] * len(mode)))
            part = image_part(image)
            assert isinstance(part.source, bytes)
            read = pil.open(io.BytesIO(part.source))
            assert read.size == (3, 2)
            assert read.convert("RGB").tobytes() == image.convert("RGB").tobytes()

    def test_a_turned_pil_image_is_seen_upright(self) -> None:
        pil = pytest.importorskip("PIL.Image")
        import io

        image = pil.new("RGB", (3, 2))
        image.getexif()[0x0112] = 6  # turned by 90 degrees
        source = image_part(image).source
        assert isinstance(source, bytes)
        read = pil.open(io.BytesIO(source))
        assert read.size == (2, 3)
        assert 0x0112 not in read.getexif()


class TestMarkedText:
    @pytest.mark.parametrize(
        ("content", "text"),
        [
            ("a", "a"),
            (None, ""),
            ([], ""),
            ([{"type": "text", "text": "a"}, {"text": "b"}], "ab"),
        ],
    )
    def test_texts(self, content: Any, text: str) -> None:
        marks = ImageMarks()
        assert marked_text(content, marks) == text
        assert not marks.images

    def test_images_are_marked(self) -> None:
        marks = ImageMarks()
        content = [
            {"type": "text", "text": "a"},
            {"type": "image", "image": b"x"},
            {"type": "image_url", "image_url": "data:,"},
            {"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}},
            {"type": "image", "image": b"y", "detail": "high"},
        ]
        assert marked_text(content, marks) == "a" + 4 * marks.mark
        assert marks.images == [
            ImagePart(b"x"),
            ImagePart("data:,"),
            ImagePart("data:,", "low"),
            ImagePart(b"y", "high"),
        ]

    @pytest.mark.parametrize(
        "content",
        [1, {"text": "a"}, ["a"], [{"type": "image_url"}], [{"type": "video", "video": b"x"}]],
    )
    def test_other_contents_are_refused(self, content: Any) -> None:
        with pytest.raises(ValueError, match="must be text"):
            marked_text(content, ImageMarks())

    @pytest.mark.parametrize("kind", ["video", "video_url", "audio", "input_audio"])
    def test_videos_and_sound_are_refused_by_name(self, kind: str) -> None:
        with pytest.raises(ValueError, match=f"text and images, not '{kind}'"):
            marked_text([{"type": kind, kind: b"x"}], ImageMarks())
