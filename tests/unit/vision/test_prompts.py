"""Prompts with images: token ids, positions of rows, truncation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.fake_vision import (
    IMAGE,
    PARTS_TEMPLATE,
    FakeImages,
    bundle,
    data_url,
    file_of,
    image_format,
    processed,
    vision,
)
from tests.unit.text import tiny
from tgi_cli.engine.messages import ImageInput
from tgi_cli.text.bundle import TextBundle
from tgi_cli.text.images import ImagePart
from tgi_cli.vision.images import ImageError
from tgi_cli.vision.prompts import (
    ImagePrompt,
    PromptTooLongError,
    bounded_tokenize,
    encode_prompt,
    renders_result_images,
    run_lengths,
    written_prompt,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextBundle:
    return bundle(tmp_path_factory.mktemp("sees"))


def image(*spans: tuple[int, int]) -> ImageInput:
    return ImageInput(digest=bytes(32), spans=spans, tensors={})


class TestEncode:
    def test_each_row_has_the_image_token(self, text: TextBundle) -> None:
        written = image_format(text.tokenizer)
        images = [processed(file_of(3)), processed(file_of(2, "1x2"))]
        tokenize = bounded_tokenize(text.tokenizer, True, 1000)
        prompt = encode_prompt(f"a{IMAGE}b{IMAGE}", images, written, tokenize)
        index = written.placeholder_id
        expected = text.tokenizer.encode("a[<image><image><image>]b[<image><image>]")
        assert prompt.ids == expected
        first, second = prompt.images
        assert [prompt.ids[start] for start, _ in (*first.spans, *second.spans)] == [index] * 2
        positions = [place for place, token in enumerate(prompt.ids) if token == index]
        assert positions == [
            place
            for each in prompt.images
            for start, count in each.spans
            for place in range(start, start + count)
        ]
        assert (first.num_rows, second.num_rows) == (3, 2)
        assert (first.grid, second.grid) == (None, (1, 2))
        assert first.digest == images[0].digest
        assert first.tensors is images[0].tensors

    @pytest.mark.parametrize("words", ["a", f"{IMAGE}{IMAGE}"])
    def test_another_number_of_placeholders_is_refused(self, text: TextBundle, words: str) -> None:
        with pytest.raises(ImageError, match="placeholders"):
            encode_prompt(
                words,
                [processed(file_of(3))],
                image_format(text.tokenizer),
                bounded_tokenize(text.tokenizer, True, 1000),
            )

    def test_rows_are_counted_per_placeholder(self, text: TextBundle) -> None:
        images = [processed(file_of(3)), processed(file_of(2))]
        written = written_prompt(f"{IMAGE}{IMAGE}", images, image_format(text.tokenizer))
        assert written == f"[{IMAGE}][{IMAGE}]"
        assert run_lengths(images) == [3, 2]

    def test_a_long_text_stops_at_the_limit(self, text: TextBundle) -> None:
        words = "the quick brown fox " * 20_000
        tokenize = bounded_tokenize(text.tokenizer, False, 500)
        with pytest.raises(PromptTooLongError) as caught:
            tokenize(words)
        assert 500 < caught.value.tokens < 10_000, "not encoded to its end"
        whole = bounded_tokenize(text.tokenizer, True, 1 << 20)(words)
        assert whole == text.tokenizer.encode(words)


class TestLast:
    IDS = (*range(10),)

    def test_a_prompt_that_is_short_enough_stays(self) -> None:
        prompt = ImagePrompt([*self.IDS], (image((2, 3)),))
        assert prompt.last(10) is prompt

    def test_images_before_the_cut_are_dropped_and_others_move(self) -> None:
        prompt = ImagePrompt([*self.IDS], (image((0, 2), (3, 1)), image((5, 2), (8, 1))))
        found = prompt.last(6)
        assert found.ids == [4, 5, 6, 7, 8, 9]
        (left,) = found.images
        assert left.spans == ((1, 2), (4, 1))

    @pytest.mark.parametrize("count", [9, 8, 7, 6])
    def test_no_image_is_cut_not_even_between_its_rows(self, count: int) -> None:
        prompt = ImagePrompt([*self.IDS], (image((0, 2), (4, 1)),))
        with pytest.raises(ImageError, match="truncated within an image"):
            prompt.last(count)

    def test_a_cut_at_an_edge_of_an_image_is_none_of_it(self) -> None:
        prompt = ImagePrompt([*self.IDS], (image((3, 4)),))
        assert prompt.last(7).images[0].spans == ((0, 4),)
        assert prompt.last(3).images == ()

    def test_tokens_in_front_may_be_kept(self) -> None:
        prompt = ImagePrompt([*self.IDS], (image((2, 2)), image((6, 2))))
        found = prompt.last(6, front=1)
        assert found.ids == [0, 5, 6, 7, 8, 9]
        assert [each.spans for each in found.images] == [((2, 2),)]


def test_ids_of_rows_are_not_those_of_the_text() -> None:
    prompt = ImagePrompt([5, 99, 99, 7, 99, 6], (image((1, 2), (4, 1)),))
    assert prompt.highest_id == 7
    assert ImagePrompt([5, 99], ()).highest_id == 99
    assert ImagePrompt([], ()).highest_id == 0


class TestReader:
    async def test_images_are_read(self, text: TextBundle) -> None:
        reader = vision(text, FakeImages()).reader
        assert reader is not None
        found = await reader.read([ImagePart(data_url(3)), ImagePart(file_of(2), "low")])
        assert [each.num_rows for each in found] == [3, 1]

    @pytest.mark.parametrize(
        ("parts", "words"),
        [
            ([ImagePart(b"image 1")] * 5, r"At most 4 image\(s\) may be provided in one prompt\."),
            ([ImagePart(b"image 1", "best")], "auto, low, high or original"),
            ([ImagePart(b"nothing")], "invalid image: it has no known format"),
            ([ImagePart("http://example.org/a.png")], "Could not fetch image"),
        ],
    )
    async def test_others_are_refused(
        self, text: TextBundle, parts: list[ImagePart], words: str
    ) -> None:
        images = FakeImages()
        reader = vision(text, images).reader
        assert reader is not None
        with pytest.raises(ImageError, match=words):
            await reader.read(parts)

    def test_closing_ends_the_processes(self, text: TextBundle) -> None:
        images = FakeImages()
        reader = vision(text, images).reader
        assert reader is not None
        reader.close()
        assert images.closed


TOOL_TEMPLATE = PARTS_TEMPLATE.replace(
    "{% for message in messages %}",
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}",
)
"""Also writes tools, calls and, as any message's, the contents of results."""


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PARTS_TEMPLATE, False),
        (TOOL_TEMPLATE, True),
        (TOOL_TEMPLATE.replace("is string", "is string or message['role'] == 'tool'"), False),
        (tiny.CHAT_TEMPLATE, False),
    ],
    ids=["without calls", "of all messages", "of the user alone", "of texts"],
)
def test_templates_tell_whether_results_may_have_images(
    tmp_path: Path, template: str, expected: bool
) -> None:
    found = bundle(tmp_path, template)
    assert found.chat_template is not None
    assert renders_result_images(found.chat_template, image_format(found.tokenizer)) is expected
    found.chat_template.close()
