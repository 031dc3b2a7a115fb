"""How long the gaps of a stream are beside images, on a clock of which only the test knows.

Steps take what they would on a CPU: decodes that vary, chunks of prompts with fixed costs, and
slices of the encoder that end at the first of its pauses behind their time.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.unit.engine.fake_images import image, image_request
from tests.unit.engine.test_image_encoding import answer
from tests.unit.engine.test_scheduler import Harness, limits, request
from tgi_cli.config import EncoderLimits
from tgi_cli.engine import step_pace
from tgi_cli.engine.step import Step

STREAM = 100
DECODE, VARIES = 0.012, 0.04
"""Seconds of a decode, and the standard deviation of what it takes, relative to that."""
FIXED, TOKEN = 0.002, 0.0006
"""Seconds of a chunk, and of each of its tokens."""
LAYERS, LAYER = 12, 0.2
"""Of the encoder, and the seconds of each."""
PIECE = 0.0015
"""The longest time between two of its pauses."""
ROWS = 120


class ClockedHarness(Harness):
    """Steps whose durations the scheduler learns; those of steps with the stream are kept."""

    def __init__(self, seed: int) -> None:
        # Warm-up has measured other times than there are: large chunks, and a decode alone.
        encoder = EncoderLimits(
            layers=LAYERS,
            row_cost=4.0,
            cache_rows=200,
            token_seconds=0.001,
            step_seconds=0.009,
            interrupts=True,
        )
        known = {"max_prefill_delay": 100, "token_seconds": 0.001, "encoder": encoder}
        super().__init__(
            limits(max_batch_prefill_tokens=256, max_total_tokens=8000, num_blocks=9000, **known)
        )
        self._random = random.Random(seed)
        self.gaps: list[float] = []

    def one(self) -> None:
        step = self.scheduler.schedule()
        assert step is not None
        seconds = self._tokens(step)
        encoded = self._slices(step, seconds)
        result = self.worker.sample(self.worker.launch(step)).wait()
        result.encodes = replace(result.encodes, seconds=encoded)
        before = len(self.tokens[STREAM])
        self.take(self.scheduler.update(result))
        self.batch.timed(step, result, seconds + encoded)
        if len(self.tokens[STREAM]) > before:
            self.gaps.append(seconds + encoded)

    def _tokens(self, step: Step) -> float:
        """A step in two hundred takes half as long again: others' work."""
        seconds = DECODE * max(0.9, self._random.gauss(1.0, VARIES))
        if step.num_prefill_tokens:
            seconds += (FIXED + TOKEN * step.num_prefill_tokens) * self._random.uniform(0.8, 1.3)
        return seconds * (1.5 if self._random.random() < 0.005 else 1.0)

    def _slices(self, step: Step, seconds: float) -> float:
        """What they take, which the worker goes on by."""
        ran = 0.0
        for part in step.encodes:
            if part.seconds is None:
                ran += 0.001
                continue
            left = part.seconds + part.rest_seconds - seconds
            took = self._random.uniform(0.2, 1.0) * PIECE
            while took < left:
                took += self._random.uniform(0.2, 1.0) * PIECE
            self.worker.layer_seconds = LAYER * part.seconds / took
            ran += took
        return ran


def gaps(photos: int, seed: int) -> tuple[list[float], list[float]]:
    """Gaps of a stream alone, then beside some photos, one after the other."""
    found = ClockedHarness(seed)
    found.add(request(STREAM, [1, 2], 7000))
    while len(found.gaps) < 500:
        found.one()
    alone, found.gaps = found.gaps[20:], []
    for number in range(photos):
        photo = image(bytes([number]), (4, ROWS))
        found.add(sent := image_request(number, range(200, 210 + ROWS), 1, photo))
        while number not in found.finished:
            found.one()
        assert found.tokens[number] == answer(sent)
    return alone, found.gaps


def high(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)]


@pytest.mark.parametrize("seed", range(3))
def test_the_longest_gaps_stay_below_twice_those_without_photos(seed: int) -> None:
    alone, beside = gaps(3, seed)
    assert len(beside) > 700
    assert high(beside) < 1.8 * high(alone)
    mean = sum(beside) / len(beside)
    assert mean > 1.45 * sum(alone) / len(alone), "photos get their part of the time"


def test_without_a_margin_they_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_pace, "IMAGE_SHARE", 1.0)
    alone, beside = gaps(3, 0)
    assert high(beside) > 1.8 * high(alone)
