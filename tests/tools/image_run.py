"""Drives a model with images over a paged cache, with features that are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.tools.paged_run import PagedRun
from tgi_cli.attention import AttentionMetadata
from tgi_cli.engine.step import NewRow, RowImage, Step
from tgi_cli.models.base import ImageRows
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.image_positions import ImagePositions


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text with images.

    Attributes:
        ids: with a placeholder for each row of an image.
        images: where they are.
        features: [N, hidden], of all placeholders in order.
        deepstack: each [N, hidden].
        length: of the prompt that the text begins with. Default: all of it.
    """

    ids: list[int]
    images: tuple[RowImage, ...] = ()
    features: Tensor | None = None
    deepstack: tuple[Tensor, ...] = ()
    length: int | None = None

    @property
    def places(self) -> list[int]:
        """The positions of placeholders."""
        return [
            position
            for image in self.images
            for start, count in image.spans
            for position in range(start, start + count)
        ]


class ImageRun(PagedRun):
    """Texts with images; ``prompts`` are the sequences that have some, by name."""

    def __init__(self, *args: Any, prompts: dict[str, Prompt], **options: Any) -> None:
        super().__init__(*args, **options)
        self._prompts = prompts
        self._rows = {name: row for row, name in enumerate(prompts)}
        specs, model = self.attention.specs, self.model
        self._images = ImagePositions(
            len(prompts) + 1,
            model.position_axes,
            any(spec.spans != "none" for spec in specs),
            any(spec.spans == "whole" for spec in specs),
        )
        for name, prompt in prompts.items():
            row, count = self._rows[name], prompt.length or len(prompt.ids)
            self._images.put(
                NewRow(row, row, prompt.ids, count, [], SamplingParams(), images=prompt.images)
            )

    def place(
        self,
        order: list[str],
        query_lens: list[int],
        positions: Tensor,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, ImageRows | None]:
        rows = [self._rows.get(name, len(self._rows)) for name in order]
        kv_lens = metadata.kv_lens_host
        starts = [end - count for end, count in zip(kv_lens, query_lens, strict=True)]
        step = Step(0, rows=rows, starts=starts, counts=query_lens)
        until = self._images.visible_until(step)
        if until is not None:
            metadata.visible_until = torch.from_numpy(until)
            metadata.num_decodes = min(metadata.num_decodes, int(np.argmax(until >= 0)))
        placed = self._images.rope(step, np.repeat(rows, query_lens), positions.numpy())
        return torch.from_numpy(placed), self._rows_of(order, starts, query_lens)

    def _rows_of(
        self, order: list[str], starts: Sequence[int], counts: Sequence[int]
    ) -> ImageRows | None:
        indices: list[int] = []
        features: list[Tensor] = []
        deepstack: list[tuple[Tensor, ...]] = []
        begin = 0
        for name, start, count in zip(order, starts, counts, strict=True):
            prompt = self._prompts.get(name)
            for number, position in enumerate(() if prompt is None else prompt.places):
                if start <= position < start + count:
                    assert prompt is not None
                    assert prompt.features is not None
                    indices.append(begin + position - start)
                    features.append(prompt.features[number])
                    deepstack.append(tuple(level[number] for level in prompt.deepstack))
            begin += count
        if not indices:
            return None
        levels = tuple(torch.stack(level) for level in zip(*deepstack, strict=True))
        return ImageRows(torch.tensor(indices), torch.stack(features), levels)
