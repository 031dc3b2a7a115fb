"""Which images the worker holds, and which give way."""

from __future__ import annotations

import pytest

from tgi_cli.engine.image_cache import CachedImage, ImageCache, ImageContent


def content(name: bytes, rows: int = 4, salt: bytes = b"") -> ImageContent:
    return ImageContent(salt, name, rows)


def encoded(cache: ImageCache, name: bytes, rows: int = 4) -> CachedImage:
    image = cache.acquire(content(name, rows))
    assert image is not None
    cache.advance(image, 1, last=True)
    return image


def test_equal_content_is_held_once_and_stays_for_later() -> None:
    cache = ImageCache(8)
    first = encoded(cache, b"cat")
    assert cache.acquire(content(b"cat")) is first
    assert (first.references, cache.num_used, cache.num_cached) == (2, 4, 0)
    cache.release(first)
    cache.release(first)
    assert (cache.num_used, cache.num_cached) == (0, 4)
    assert cache.acquire(content(b"cat")) is first
    assert (cache.num_used, cache.num_cached) == (4, 0)
    assert (cache.encoded_images, cache.reused_images) == (1, 2)
    assert cache.take_dropped() == []


@pytest.mark.parametrize("other", [content(b"dog"), content(b"cat", 3), content(b"cat", 4, b"s")])
def test_other_content_has_features_of_its_own(other: ImageContent) -> None:
    cache = ImageCache(8)
    first = encoded(cache, b"cat")
    second = cache.acquire(other)
    assert second is not None
    assert second.key != first.key
    assert not second.encoded


def test_the_least_recently_released_give_way_first_and_no_more_than_needed() -> None:
    cache = ImageCache(12)
    images = {name: encoded(cache, name) for name in (b"a", b"b", b"c")}
    for name in (b"b", b"c", b"a"):
        cache.release(images[name])
    again = cache.acquire(content(b"b"))
    assert again is images[b"b"]
    cache.release(again)
    assert cache.acquire(content(b"d", 5)) is not None
    assert cache.take_dropped() == [images[b"c"].key, images[b"a"].key]
    assert cache.acquire(content(b"b")) is again, "it was released last"


def test_without_room_nothing_gives_way_in_vain() -> None:
    cache = ImageCache(12)
    held, idle = encoded(cache, b"a", 8), encoded(cache, b"b", 4)
    cache.release(idle)
    assert cache.acquire(content(b"c", 5)) is None
    assert cache.take_dropped() == []
    assert cache.acquire(content(b"b")) is idle
    cache.release(held)
    assert cache.acquire(content(b"c", 5)) is not None


def test_what_is_given_up_before_it_is_encoded_is_dropped() -> None:
    cache = ImageCache(8)
    begun = cache.acquire(content(b"cat"))
    untouched = cache.acquire(content(b"dog"))
    assert begun is not None
    assert untouched is not None
    cache.advance(begun, 1, last=False)
    assert cache.current is begun
    cache.release(begun)
    cache.release(untouched)
    assert cache.current is None
    assert cache.take_dropped() == [begun.key], "the worker never heard of the other"
    assert cache.num_used == cache.num_cached == 0
    again = cache.acquire(content(b"cat"))
    assert again is not None
    assert again.key != begun.key, "keys are never used again"


def test_a_failed_image_is_found_no_more_and_named_until_it_is_released() -> None:
    cache = ImageCache(8)
    image = encoded(cache, b"cat")
    cache.fail(image.key, "unreadable")
    assert (image.error, image.encoded, cache.failed) == ("unreadable", False, {image})
    assert cache.take_dropped() == [image.key]
    assert cache.num_used == 0
    again = cache.acquire(content(b"cat"))
    assert again is not image
    cache.release(image)
    assert not cache.failed
    cache.fail(image.key, "again")
    cache.fail(99, "who?")
    assert image.error == "unreadable"


def test_a_failure_ends_the_encoders_run() -> None:
    cache = ImageCache(8)
    image = cache.acquire(content(b"cat"))
    assert image is not None
    cache.advance(image, 2, last=False)
    cache.fail(image.key, "the step broke")
    assert cache.current is None


def test_a_reference_is_released_once() -> None:
    cache = ImageCache(8)
    image = encoded(cache, b"cat")
    cache.release(image)
    with pytest.raises(ValueError, match="more often"):
        cache.release(image)
