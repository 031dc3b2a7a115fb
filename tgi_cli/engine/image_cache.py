"""Encoded images on the worker, by content: numbers only.

The worker holds an image's *features*, one row per token of the image, under a key. An image is one
of

===========  ===========================  ==================================================
state        references                   features
===========  ===========================  ==================================================
begun        > 0                          being computed, for one image at a time
used         > 0                          needed by that many sequences
cached       0                            kept until other images need the rows
failed       > 0, or forgotten            none: sequences that wait for them are to end
===========  ===========================  ==================================================

All except failed ones count against the capacity, from their first reference on. Cached ones are
evicted, least recently released first; the next step sends the worker the keys to forget.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple


class ImageContent(NamedTuple):
    """The key of the index: equal contents have equal features, under one salt."""

    salt: bytes
    digest: bytes
    rows: int


@dataclass(slots=True, eq=False)
class CachedImage:
    """An image that is encoded, or is to be.

    Attributes:
        key: names its features to the worker; never reused.
        content: its key in the index.
        begun: whether a step has given it to the encoder.
        layers: layers of the encoder that steps have run for it.
        encoded: whether the last layer has run.
        references: sequences that need it, counted once for each place in their prompts.
        error: why it cannot be encoded, or empty.
    """

    key: int
    content: ImageContent
    begun: bool = False
    layers: int = 0
    encoded: bool = False
    references: int = 0
    error: str = ""

    @property
    def rows(self) -> int:
        return self.content.rows


class ImageCache:
    """Reference-counted images with an index of their content.

    Args:
        num_rows: capacity, in rows of features.

    Attributes:
        current: the image that is begun and not encoded yet, or None.
        failed: images that could not be encoded, and are still referenced.
        encoded_images, reused_images: totals of images that were encoded, and that were found.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.current: CachedImage | None = None
        self.failed: set[CachedImage] = set()
        self.encoded_images = 0
        self.reused_images = 0
        self._by_content: dict[ImageContent, CachedImage] = {}
        self._by_key: dict[int, CachedImage] = {}
        self._idle: OrderedDict[int, CachedImage] = OrderedDict()
        self._held_rows = 0
        self._idle_rows = 0
        self._dropped: list[int] = []
        self._next_key = 0

    @property
    def num_used(self) -> int:
        """Rows of images with references."""
        return self._held_rows - self._idle_rows

    @property
    def num_cached(self) -> int:
        """Rows of images that could be evicted."""
        return self._idle_rows

    def acquire(self, content: ImageContent) -> CachedImage | None:
        """Add a reference to an image, encoded or not; None if its rows do not fit now."""
        image = self._by_content.get(content)
        if image is None:
            if self.num_used + content.rows > self.num_rows:
                return None
            while self._held_rows + content.rows > self.num_rows:
                self._forget(next(iter(self._idle.values())))
            image = CachedImage(self._next_key, content)
            self._next_key += 1
            self._by_content[content] = self._by_key[image.key] = image
            self._held_rows += content.rows
        else:
            self.reused_images += 1
            if self._idle.pop(image.key, None) is not None:
                self._idle_rows -= image.rows
        image.references += 1
        return image

    def release(self, image: CachedImage) -> None:
        """Drop a reference. An encoded image stays cached; without references, others are dropped.

        Raises:
            ValueError: the image has no reference.
        """
        if not image.references:
            raise ValueError(f"image {image.key} released more often than acquired")
        image.references -= 1
        if image.references:
            return
        if image.error:
            self.failed.discard(image)
        elif image.encoded:
            self._idle[image.key] = image
            self._idle_rows += image.rows
        else:
            self._forget(image)

    def advance(self, image: CachedImage, layers: int, last: bool) -> None:
        """Record that a step runs the next ``layers`` of the encoder, the ``last`` ones if so."""
        image.begun = True
        image.layers += layers
        image.encoded = last
        self.encoded_images += last
        self.current = None if last else image

    def progress(self, key: int, layers: int) -> None:
        """Record that ``layers`` of the encoder have run for an image. Unknown keys are ignored."""
        if self.current is not None and self.current.key == key:
            self.current.layers = layers

    def fail(self, key: int, cause: str) -> None:
        """Record that an image could not be encoded or was lost. Unknown keys are ignored."""
        image = self._by_key.get(key)
        if image is None:
            return
        self._forget(image)
        image.encoded = False
        image.error = cause
        if image.references:
            self.failed.add(image)

    def take_dropped(self) -> list[int]:
        """The keys dropped since the last call, which the worker is to forget."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _forget(self, image: CachedImage) -> None:
        del self._by_content[image.content], self._by_key[image.key]
        self._held_rows -= image.rows
        if self._idle.pop(image.key, None) is not None:
            self._idle_rows -= image.rows
        if self.current is image:
            self.current = None
        if image.begun:
            self._dropped.append(image.key)
