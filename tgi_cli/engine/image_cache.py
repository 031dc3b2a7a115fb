"""Encoded images on the worker, by content: numbers only.

Their *features* are as many rows as the image has tokens, which the worker holds under a key. An
image here is one of

===========  ===========================  ==================================================
state        references                   features
===========  ===========================  ==================================================
begun        > 0                          being computed, of one image at a time
used         > 0                          needed by that many sequences
cached       0                            kept until others need the rows
failed       > 0, or forgotten            none: sequences that wait for them are to end
===========  ===========================  ==================================================

All but failed ones count against the capacity, from their first reference on. Cached ones give way,
least recently released first; what the worker is to forget is sent with the next step.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple


class ImageContent(NamedTuple):
    """What features are found by: equal contents have equal features, under one salt."""

    salt: bytes
    digest: bytes
    rows: int


@dataclass(slots=True, eq=False)
class CachedImage:
    """An image that is encoded, or is to be.

    Attributes:
        key: names its features to the worker, and no others ever.
        content: what it is found by.
        begun: whether a step has given it to the encoder.
        layers: of the encoder, that steps have run for it.
        encoded: whether they have run the last one.
        references: sequences that need it, once for each place in their prompts.
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
        encoded_images, reused_images: totals of images encoded, and of those that were found.
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
        """Rows of images that could give way."""
        return self._idle_rows

    def acquire(self, content: ImageContent) -> CachedImage | None:
        """Take a reference to an image, encoded or not; None if its rows do not fit now."""
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
        """Drop a reference. What is encoded stays for others; what is not is given up.

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
        """A step is to run the next ``layers`` of the encoder; with the last ones it is encoded."""
        image.begun = True
        image.layers += layers
        image.encoded = last
        self.encoded_images += last
        self.current = None if last else image

    def progress(self, key: int, layers: int) -> None:
        """So many layers have run of an image in the encoder. Unknown keys are ignored."""
        if self.current is not None and self.current.key == key:
            self.current.layers = layers

    def fail(self, key: int, cause: str) -> None:
        """An image could not be encoded, or its features are lost. Unknown keys are ignored."""
        image = self._by_key.get(key)
        if image is None:
            return
        self._forget(image)
        image.encoded = False
        image.error = cause
        if image.references:
            self.failed.add(image)

    def take_dropped(self) -> list[int]:
        """The keys that the worker is to forget, since the last call."""
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
