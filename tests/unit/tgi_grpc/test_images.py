"""Images in the requests of TGI's own services."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tools import fake_vision
from tests.tools.fake_vision import IMAGE, FakeImages, data_url, file_of
from tests.unit.model_server.fakes import INFO
from tgi_cli.engine.messages import GenerationRequest
from tgi_cli.text.bundle import TextBundle
from tgi_cli.text.images import ImagePart
from tgi_cli.tgi_grpc import generate_v2_pb2, generate_v3_pb2
from tgi_cli.tgi_grpc.model_text import ModelText
from tgi_cli.tgi_grpc.requests import RequestReader, Watermark
from tgi_cli.vision.load import Vision

INFO_SEES = replace(
    INFO, vocab_size=400, max_input_tokens=99, max_total_tokens=100, vision=True, max_image_rows=64
)
NO_ADAPTERS: Any = SimpleNamespace(id_of=lambda name: 0)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextBundle:
    return fake_vision.bundle(tmp_path_factory.mktemp("sees"))


@pytest.fixture
def images() -> FakeImages:
    return FakeImages()


@pytest.fixture
def model_text(text: TextBundle, images: FakeImages) -> Iterator[ModelText]:
    found = ModelText(text.tokenizer, (1,), lambda: fake_vision.vision(text, images))
    yield found
    found.close()


@pytest.fixture
def reader(model_text: ModelText) -> RequestReader:
    return RequestReader(INFO_SEES, lambda: model_text, NO_ADAPTERS, Watermark())


def chunk(content: str | bytes) -> Any:
    if isinstance(content, str):
        return generate_v3_pb2.InputChunk(text=content)
    image = generate_v3_pb2.Image(data=content, mimetype="image/png")
    return generate_v3_pb2.InputChunk(image=image)


def v3(*contents: str | bytes, **fields: Any) -> Any:
    return generate_v3_pb2.Request(
        id=1,
        inputs="what the chunks say, as Markdown",
        input_chunks=generate_v3_pb2.Input(chunks=[chunk(each) for each in contents]),
        stopping_parameters={"max_new_tokens": 5},
        **{"add_special_tokens": True, **fields},
    )


def v2(inputs: str, **fields: Any) -> Any:
    return generate_v2_pb2.Request(
        id=1, inputs=inputs, stopping_parameters={"max_new_tokens": 5}, **fields
    )


def prompt_of(found: GenerationRequest, text: TextBundle) -> str:
    return text.tokenizer.decode(found.prompt_ids, skip_special_tokens=False)


def test_chunks_of_version_3(reader: RequestReader, text: TextBundle) -> None:
    found = reader.read(v3("a ", file_of(3), " b", file_of(2)), 7, INFO_SEES)
    assert prompt_of(found, text) == f"<|begin|>a [{IMAGE * 3}] b[{IMAGE * 2}]"
    assert [image.num_rows for image in found.images] == [3, 2]
    index = text.tokenizer.backend.token_to_id(IMAGE)
    for image in found.images:
        for start, count in image.spans:
            assert found.prompt_ids[start : start + count] == (index,) * count
    assert found.images[0].tensors["pixel_values"].shape == (3, 4)


@pytest.mark.parametrize("version", [2, 3])
def test_markdown_where_there_are_no_chunks(
    reader: RequestReader, text: TextBundle, version: int
) -> None:
    inputs = f"a ![]({data_url(3)}) b"
    if version == 2:
        asked = v2(inputs)
    else:
        asked = v3()
        asked.inputs = inputs
    found = reader.read(asked, 7, INFO_SEES)
    assert prompt_of(found, text) == f"<|begin|>a [{IMAGE * 3}] b"


def test_nothing_is_fetched(reader: RequestReader) -> None:
    """TGI's router does that."""
    with pytest.raises(ValueError, match="Could not fetch image"):
        reader.read(v2("![](http://example.org/a.png)"), 7, INFO_SEES)


def test_rows_count_toward_the_limits(reader: RequestReader) -> None:
    with pytest.raises(ValueError, match="max_total_tokens"):
        reader.read(v3(file_of(99)), 7, INFO_SEES)


def test_truncation_keeps_the_tokens_in_front_and_cuts_no_image(
    reader: RequestReader, text: TextBundle
) -> None:
    contents = ("the quick brown fox", file_of(3), "x")
    whole = reader.read(v3(*contents), 7, INFO_SEES)
    count = 1 + len(text.tokenizer.encode(f"[{IMAGE * 3}]x", False))
    found = reader.read(v3(*contents, truncate=count), 7, INFO_SEES)
    assert found.prompt_ids == (whole.prompt_ids[0], *whole.prompt_ids[1 - count :])
    ((start, rows),) = found.images[0].spans
    assert (start, rows) == (2, 3)
    with pytest.raises(ValueError, match="truncated within an image"):
        reader.read(v3(*contents, truncate=count - 2), 7, INFO_SEES)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "empty"),
        (b"nothing", "invalid image: it has no known format"),
    ],
)
def test_invalid_images_are_refused(reader: RequestReader, content: bytes, cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        reader.read(v3("a", content), 7, INFO_SEES)


def test_a_model_whose_images_are_not_served_says_why(text: TextBundle) -> None:
    found = ModelText(text.tokenizer, (1,), lambda: Vision(reason="its encoder is missing"))
    reader = RequestReader(INFO_SEES, lambda: found, NO_ADAPTERS, Watermark())
    for asked in (v3("a", file_of(3)), v2(f"a![]({data_url(3)})")):
        with pytest.raises(ValueError, match="takes none here: its encoder is missing"):
            reader.read(asked, 7, INFO_SEES)


def test_markdown_is_text_to_a_model_of_text(text: TextBundle) -> None:
    reader = RequestReader(
        INFO_SEES, lambda: ModelText(text.tokenizer, (1,)), NO_ADAPTERS, Watermark()
    )
    found = reader.read(v2("see ![](a.png)"), 7, INFO_SEES)
    assert list(found.prompt_ids) == text.tokenizer.encode("see ![](a.png)")
    assert found.images == ()


def test_closing_ends_the_processes(model_text: ModelText, images: FakeImages) -> None:
    model_text.encode_with_images(["a", ImagePart(file_of(1))], True, 0)
    model_text.close()
    assert images.closed
