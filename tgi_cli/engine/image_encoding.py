"""Which images a step encodes, and how far it may compute prompts that contain them.

A token that stands for an image is computed once the image is encoded: by an earlier step, or by
the same one before its forward pass. An encoder's run is work like a prompt's tokens, and shares
their budget: a row costs ``row_cost`` tokens. It is cut into slices of whole layers, so that a step
with a slice takes no longer than one with a chunk of a prompt, except for the last layer or a layer
that exceeds a step's budget by itself.

Beside decodes, images and the prompts that contain them may lengthen a step by a share of what its
decodes take (:mod:`tgi_cli.engine.step_pace`). On a CPU, where a layer alone may take longer, such
slices are bounded by time instead, and results say how far they went. They run after the step's
tokens, and end when the step has lasted as long as decodes usually take and that share of it: so
its length does not depend on how long this one's decodes took. Beside prompts of text alone,
images get half of the budget: texts need not wait until a photo is encoded.

One image is in the encoder at a time, as warm-up has measured the memory of one: an image that was
begun is finished before the next. From one step to the next, a sequence refers to the images of at
most one unit (see :mod:`tgi_cli.engine.prompt_images`), so that no two sequences wait for each
other's rows in the cache.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tgi_cli.config import EncoderLimits
from tgi_cli.engine.image_cache import ImageCache, ImageContent
from tgi_cli.engine.image_slices import EncodeReport, EncodeSlice, ImageSpan
from tgi_cli.engine.prompt_images import ImageUnit
from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.step import Step
from tgi_cli.engine.step_pace import StepPace

NO_ENCODER = EncoderLimits(layers=1, row_cost=1.0, cache_rows=0)
"""Limits of a model that takes no images, but whose prompts must not be split."""


class ImageEncoding:
    """Plans the steps of sequences with images.

    Args:
        limits: limits of the model's encoder.
        pace: bounds the time of images in a step that streams wait for.

    Attributes:
        cache: the images that the worker holds.
    """

    def __init__(self, limits: EncoderLimits, pace: StepPace) -> None:
        self.cache = ImageCache(limits.cache_rows)
        self._pace = pace
        self._limits = limits
        self._budget = self._left = self._granted = 0
        self._interrupts = False
        """Whether slices of the step being planned are bounded by time."""
        self._passed: list[tuple[Sequence, int]] = []
        """Images whose last tokens the step being planned computes."""

    def begin(self, budget: int, waits: bool, texts: bool) -> None:
        """Prepare to plan the prompts of a step, with a budget of tokens.

        Args:
            waits: whether streams wait for the step: it has decodes.
            texts: whether there are prompts without images.
        """
        self._budget = budget
        if waits:
            self._left = self._pace.image_tokens(budget)
        else:
            self._left = -(-budget // 2) if texts else budget
        self._granted = self._left
        self._interrupts = waits and self._pace.interrupts

    def plan(self, step: Step, sequence: Sequence, budget: int, goal: int) -> tuple[int, int]:
        """Plan the next chunk of a sequence whose prompt has images ahead.

        Alone in its step, a layer of the encoder, or a run of tokens that must not be split, may
        exceed the budget.

        Args:
            step: gets the slices that are encoded for it.
            sequence: with a row.
            budget: tokens that the step may still compute.
            goal: position at which the chunk is to end. It ends earlier where the budget or the
                features end, and later if tokens that must not be split do.

        Returns:
            The number of tokens to compute, and the budget that is left.
        """
        most = min(max(0, budget), self._left)
        count, left = self._plan(step, sequence, most, budget == self._budget, goal)
        self._left -= most - left
        return count, max(0, budget - max(most - left, count))

    def _plan(
        self, step: Step, sequence: Sequence, left: int, fresh: bool, goal: int
    ) -> tuple[int, int]:
        """The same within ``left`` tokens; ``fresh``: the step has no other token of a prompt."""
        images = sequence.images
        assert images is not None
        start = end = sequence.num_computed
        for unit in images.units_from(start):
            stop = min(goal, unit.begin, end + left)
            if stop > end:
                left, end, fresh = left - (stop - end), stop, False
            if end < unit.begin or end >= goal or not (left or fresh):
                return end - start, left
            if not self._hold(sequence, unit):
                return end - start, left
            encoded, left, fresh = self._encode(step, sequence, unit, left, fresh)
            if not encoded:
                return end - start, left
            wanted = min(goal, unit.end, end + left)
            stop = images.fit(end, wanted, end + left)
            if stop == end and fresh:
                stop = images.fit(end, wanted, None)
            if stop > end:
                left, end, fresh = max(0, left - (stop - end)), stop, False
            if end < unit.end:
                return end - start, left
            self._passed += ((sequence, index) for index in unit.images)
        stop = max(end, min(goal, end + left))
        return stop - start, left - (stop - end)

    def _hold(self, sequence: Sequence, unit: ImageUnit) -> bool:
        """Have a sequence refer to all images of a unit that it needs, or to none."""
        images = sequence.images
        assert images is not None
        taken: list[int] = []
        for index in unit.images:
            if index in sequence.held_images or images.last_position(index) < sequence.num_computed:
                continue
            source = images.inputs[index]
            content = ImageContent(sequence.request.cache_salt, source.digest, source.num_rows)
            image = self.cache.acquire(content)
            if image is None:
                for other in taken:
                    self.cache.release(sequence.held_images.pop(other))
                return False
            sequence.held_images[index] = image
            taken.append(index)
        return True

    def _encode(
        self, step: Step, sequence: Sequence, unit: ImageUnit, left: int, fresh: bool
    ) -> tuple[bool, int, bool]:
        """Encode the images of a unit as far as the budget goes.

        Args:
            left: tokens that the step may still compute.
            fresh: whether it computes no other token of a prompt yet: then a layer may exceed it.

        Returns:
            Whether all are encoded, and ``left`` and ``fresh`` after that.
        """
        assert sequence.images is not None
        layers = self._limits.layers
        for index in unit.images:
            image = sequence.held_images.get(index)
            while image is not None and not image.encoded:
                current = self.cache.current or image
                tensors = None if current.begun else sequence.images.inputs[index].tensors
                cost = max(current.rows * self._limits.row_cost / layers, 1e-9)
                lacking = layers - current.layers
                if lacking and self._interrupts:
                    if left:
                        seconds = self._pace.slice_seconds(left / self._granted)
                        part = EncodeSlice(current.key, current.rows, 0, False, tensors, seconds)
                        step.encodes.append(part)
                        self.cache.advance(current, 0, False)
                    return False, 0, False
                count = min(lacking, int(left / cost))
                if not count and lacking:
                    if not fresh:
                        return False, left, False
                    count = 1
                last = count == lacking
                step.encodes.append(EncodeSlice(current.key, current.rows, count, last, tensors))
                self.cache.advance(current, count, last)
                left, fresh = max(0, left - math.ceil(count * cost)), fresh and not count
        return True, left, fresh

    def spans(self, sequence: Sequence, index: int, start: int, end: int) -> list[ImageSpan]:
        """The images at positions ``start`` to ``end``, computed by entry ``index`` of a step."""
        assert sequence.images is not None
        return [
            ImageSpan(
                index,
                span.start - start,
                span.end - span.start,
                sequence.held_images[span.image].key,
                span.first,
            )
            for span in sequence.images.spans_between(start, end)
        ]

    def commit(self, step: Step) -> None:
        """A step is complete: let go of the images that it passes, and send what is dropped."""
        for sequence, index in self._passed:
            image = sequence.held_images.pop(index, None)
            if image is not None:
                self.cache.release(image)
        self._passed.clear()
        step.dropped_images = dropped = self.cache.take_dropped()
        if dropped and step.encodes:  # of a sequence that lost its row in this same step
            step.encodes = [each for each in step.encodes if each.key not in dropped]
        if self._interrupts and step.encodes:
            rest = self._pace.rest_seconds(step)
            step.encodes = [
                part if part.seconds is None else replace(part, rest_seconds=rest)
                for part in step.encodes
            ]

    def learn(self, report: EncodeReport) -> None:
        """Apply the report of a step on its slices."""
        for key, layers in report.layers.items():
            self.cache.progress(key, layers)

    def release(self, sequence: Sequence) -> None:
        """Release the images of a sequence that leaves its row or pauses."""
        for image in sequence.held_images.values():
            self.cache.release(image)
        sequence.held_images.clear()
