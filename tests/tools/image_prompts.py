"""Prompts with images for tests: ids, and the rows that take the place of some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tgi_cli.models.base import ImageRows
from tgi_cli.models.vision import ImageFeatures


@dataclass(frozen=True, slots=True)
class ImageChunk:
    """What images change for some tokens of a sequence.

    Attributes:
        rows: those that stand for images, with their indices among these; None if none does.
        positions: int64 [3, n], of all of them; None where they count up.
        until: int32 [n], see ``AttentionMetadata.visible_until``; None where attention is causal.
    """

    rows: ImageRows | None = None
    positions: Tensor | None = None
    until: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A prompt, of which some tokens are rows of images.

    Attributes:
        ids: of all tokens.
        spans: start and end of each image.
        features: of all images together.
        positions: int64 [3, n], of a model whose positions have three axes.
        until: int32 [n], of a model with bidirectional spans.
    """

    ids: list[int]
    spans: list[tuple[int, int]]
    features: ImageFeatures
    positions: Tensor | None = None
    until: Tensor | None = None

    @classmethod
    def of(cls, parts: Sequence[list[int] | ImageFeatures], image_token: int) -> ImagePrompt:
        """Of text and images in turn."""
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        images = [part for part in parts if isinstance(part, ImageFeatures)]
        for part in parts:
            if isinstance(part, list):
                ids += part
            else:
                spans.append((len(ids), len(ids) + len(part.rows)))
                ids += [image_token] * len(part.rows)
        levels = zip(*(image.deepstack for image in images), strict=True)
        rows = torch.cat([image.rows for image in images])
        return cls(ids, spans, ImageFeatures(rows, tuple(torch.cat(each) for each in levels)))

    def bidirectional(self, whole: bool) -> ImagePrompt:
        """With tokens of an image, or with ``whole`` of the prompt, that attend to each other."""
        until = torch.full((len(self.ids),), -1, dtype=torch.int32)
        for start, end in [(0, len(self.ids))] if whole else self.spans:
            until[start:end] = end - 1
        return replace(self, until=until)

    def end(self, start: int, size: int) -> int:
        """Where a chunk of about ``size`` tokens ends: not in tokens that attend to each other."""
        end = min(start + size, len(self.ids))
        if self.until is None or end == 0:
            return end
        return max(end, int(self.until[end - 1]) + 1)

    def chunk(self, start: int, end: int) -> ImageChunk:
        """Of the tokens from ``start`` to ``end``, which may be behind the prompt's."""
        places = torch.tensor([place for span in self.spans for place in range(*span)])
        own = (places >= start) & (places < end)
        rows = None
        if own.any():
            levels = tuple(level[own] for level in self.features.deepstack)
            rows = ImageRows(places[own] - start, self.features.rows[own], levels)
        until = None if self.until is None else self.until[start:end]
        if until is not None and len(until) < end - start:
            until = torch.cat((until, until.new_full((end - start - len(until),), -1)))
        return ImageChunk(rows, self._positions(start, end), until)

    def _positions(self, start: int, end: int) -> Tensor | None:
        if self.positions is None:
            return None
        behind = torch.arange(max(0, end - len(self.ids))) + self.positions.max() + 1
        return torch.cat((self.positions, behind.expand(3, -1)), dim=1)[:, start:end]
