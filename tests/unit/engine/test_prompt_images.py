"""Where images are in a prompt, what must not be parted, and what blocks depend on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.engine.fake_images import IMAGE_ID, image, image_request
from tests.unit.engine.test_scheduler import limits
from tests.unit.engine.test_thinking import info
from tgi_cli.config import EncoderLimits
from tgi_cli.engine.kv_cache import KVCache
from tgi_cli.engine.messages import GenerationRequest, ImageInput
from tgi_cli.engine.prompt_images import PromptImages, validate_images
from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.validation import validate_for_engine, validate_request

ENCODER = EncoderLimits(layers=4, row_cost=1.0, cache_rows=32)


def hashes(sent: GenerationRequest, whole: bool = False) -> list[bytes]:
    """Of the prompt's full blocks, of 4 tokens."""
    cache = KVCache(limits(encoder=ENCODER))
    sequence = Sequence(sent, 1, None, whole)
    cache.match(sequence)
    return sequence.block_hashes


def common(one: GenerationRequest, other: GenerationRequest, whole: bool = False) -> int:
    """How many leading blocks two prompts share."""
    pairs = zip(hashes(one, whole), hashes(other, whole), strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(hashes(one, whole)))


TEXT = list(range(100, 132))


def test_a_block_depends_on_the_images_that_it_touches_and_on_those_before() -> None:
    cat, dog = image(b"cat", (9, 6)), image(b"dog", (9, 6))
    assert common(image_request(1, TEXT, 1, cat), image_request(2, TEXT, 1, cat)) == 8
    assert common(image_request(1, TEXT, 1, cat), image_request(2, TEXT, 1, dog)) == 2


def test_text_with_the_ids_of_an_image_shares_no_block_with_the_image() -> None:
    sent = image_request(1, TEXT, 1, image(b"cat", (8, 4)))
    assert common(sent, replace(sent, request_id=2, images=())) == 2


def test_a_block_depends_on_which_rows_of_an_image_it_has() -> None:
    first = PromptImages(image_request(1, TEXT, 1, image(b"cat", (4, 8))))
    later = PromptImages(image_request(1, TEXT, 1, image(b"cat", (8, 8))))
    parted = PromptImages(image_request(1, TEXT, 1, image(b"cat", (4, 3), (8, 5))))
    assert len({each.content(8, 12) for each in (first, later, parted)}) == 3
    assert first.content(0, 4) == first.content(12, 16) == b""


@pytest.mark.parametrize(
    "changes",
    [{"grid": (3, 2)}, {"grid": (2, 3)}, {"bidirectional": True}, {"digest": bytes(32)}],
)
def test_a_block_depends_on_all_that_tells_an_image_from_another(changes: dict[str, Any]) -> None:
    cat = image(b"cat", (9, 6))
    assert (
        common(image_request(1, TEXT, 1, cat), image_request(2, TEXT, 1, replace(cat, **changes)))
        == 2
    )


def test_the_first_block_of_an_image_cannot_be_posed_by_a_salt() -> None:
    cat = image(b"cat", (0, 4))
    sent = image_request(1, TEXT, 1, cat, cache_salt=b"one")
    assert common(sent, image_request(2, TEXT, 1, cat, cache_salt=b"two")) == 0


def test_a_whole_prompt_shares_its_blocks_with_equal_prompts_alone() -> None:
    cat = image(b"cat", (0, 6))
    sent = image_request(1, TEXT, 1, cat)
    assert common(sent, image_request(2, TEXT, 1, cat), whole=True) == 8
    assert common(sent, image_request(2, [*TEXT[:-1], 7], 1, cat), whole=True) == 0
    assert common(sent, image_request(2, TEXT, 1, image(b"dog", (0, 6))), whole=True) == 0


def test_a_chunk_ends_before_what_must_not_be_parted_or_behind_it() -> None:
    images = PromptImages(
        image_request(
            1, TEXT, 1, image(b"cat", (4, 6), (12, 6), bidirectional=True), image(b"x", (20, 4))
        )
    )
    assert images.longest_whole == 6
    assert [images.fit(0, end, 0) for end in (3, 4, 5, 9, 10, 11)] == [3, 4, 4, 4, 10, 11]
    assert images.fit(0, 5, 10) == 10, "there is room for all of it"
    assert images.fit(0, 5, None) == 10
    assert images.fit(6, 8, 9) == 6, "a chunk may begin within, but not end there"
    assert images.fit(6, 8, 10) == 10
    assert images.fit(11, 14, 17) == 12
    assert images.fit(18, 22, 0) == 22, "rows of the second image do not attend to each other"


def test_parts_of_spans_know_their_rows() -> None:
    images = PromptImages(
        image_request(1, TEXT, 1, image(b"a", (2, 3), (6, 4)), image(b"b", (12, 2)))
    )
    assert [tuple(span) for span in images.spans_between(0, 32)] == [
        (2, 5, 0, 0),
        (6, 10, 0, 3),
        (12, 14, 1, 0),
    ]
    assert [tuple(span) for span in images.spans_between(4, 8)] == [(4, 5, 0, 2), (6, 8, 0, 3)]
    assert [tuple(span) for span in images.spans_between(8, 13)] == [(8, 10, 0, 5), (12, 13, 1, 0)]
    assert not list(images.spans_between(10, 12))
    assert images.end == 14


def test_drafts_end_before_a_token_that_stands_for_an_image() -> None:
    images = PromptImages(image_request(1, TEXT, 1, image(b"a", (2, 3))))
    assert images.drafts([4, 5, IMAGE_ID, 6]) == [4, 5]
    assert images.drafts([4, 5]) == [4, 5]


CAT = image(b"cat", (4, 6))


@pytest.mark.parametrize(
    ("images", "problem"),
    [
        ((replace(CAT, digest=b"short"),), "digest of 5 bytes"),
        ((replace(CAT, tensors={}),), "no tensors"),
        ((replace(CAT, spans=()),), "no place"),
        ((replace(CAT, spans=((4, 0),)),), "not in order"),
        ((replace(CAT, spans=((4, 3), (6, 3))),), "not in order"),
        ((CAT, image(b"dog", (8, 2))), "image 2 are not in order"),
        ((CAT, image(b"dog", (30, 3))), "beyond the end"),
        ((replace(CAT, grid=(2, 2)),), "6 rows, and a grid of 2 x 2"),
        ((replace(CAT, grid=(-2, -3)),), "grid of -2 x -3"),
        ((replace(CAT, spans=((4, 3), (8, 3)), grid=(2, 3)),), "more than one run"),
    ],
)
def test_images_that_do_not_fit_the_prompt_are_refused(
    images: tuple[ImageInput, ...], problem: str
) -> None:
    sent = replace(image_request(1, TEXT, 1), images=images)
    with pytest.raises(ValueError, match=problem):
        validate_images(sent)
    with pytest.raises(ValueError, match=problem):
        validate_for_engine(sent, limits(encoder=ENCODER))


@pytest.mark.parametrize(
    ("changes", "images", "problem"),
    [
        ({}, (CAT,), "takes no images"),
        ({"encoder": replace(ENCODER, cache_rows=5)}, (CAT,), "more than can be encoded"),
        (
            {"encoder": ENCODER, "max_batch_prefill_tokens": 5},
            (replace(CAT, bidirectional=True),),
            "6 tokens attend to each other",
        ),
        (
            {"encoder": ENCODER, "max_batch_prefill_tokens": 31, "whole_prompts": True},
            (CAT,),
            "32 tokens attend to each other",
        ),
        (
            {"encoder": replace(ENCODER, cache_rows=9), "whole_prompts": True},
            (CAT, image(b"dog", (20, 4))),
            "images of 10 tokens",
        ),
    ],
)
def test_images_that_can_never_be_computed_are_refused(
    changes: dict[str, Any], images: tuple[ImageInput, ...], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        validate_for_engine(image_request(1, TEXT, 1, *images), limits(**changes))


def test_ids_behind_the_vocabulary_may_stand_for_images_alone() -> None:
    sent = image_request(1, TEXT, 1, CAT, image(b"dog", (20, 2), (23, 2)))
    validate_request(sent, info())
    ids = list(sent.prompt_ids)
    ids[11] = IMAGE_ID
    with pytest.raises(ValueError, match="vocabulary"):
        validate_request(replace(sent, prompt_ids=tuple(ids)), info())
    with pytest.raises(ValueError, match="no place"):
        validate_request(replace(sent, images=(replace(CAT, spans=()),)), info())
