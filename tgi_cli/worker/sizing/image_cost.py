"""What images cost: the memory of the largest one, and its time relative to a prompt's tokens.

Measured at warm-up by the image encoder itself, after the worst steps. On a CPU only the smallest
image is encoded as a whole; of the largest one, enough layers run to estimate memory and time of
the others, since a server should start within seconds.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from tgi_cli.config import EncoderLimits, EngineConfig
from tgi_cli.device.distributed import Shard
from tgi_cli.engine.step import Step
from tgi_cli.errors import OutOfMemoryError
from tgi_cli.models.vision import VisionTower
from tgi_cli.worker.images import ImageEncoder
from tgi_cli.worker.sizing.memory import PeakMeter
from tgi_cli.worker.sizing.profile_steps import prompt_step

log = logging.getLogger(__name__)

IMAGE_SHARE = 4
"""An image takes at most this part of the longest prompt, if its family can make it smaller."""

CACHE_BYTES = 64 << 20
"""Features kept for later requests, or those of one largest image if that is more. They spare
the encoder where an image comes back with other text before it, or after its blocks were reused;
otherwise its blocks are found, and it needs no features."""

TIMED_TOKENS = 256
"""Prompt tokens of the step that images are compared with, as far as the limits allow."""

TIMED_LAYERS = 2
"""Layers that run of the largest image on a CPU."""

GUESSED_ROW_COST = 8.0
"""Used for a cost that cannot be measured: that of a tower as large as the decoder, with 4 patches
per token, which attend to each other."""

GUESSED_ROW_BYTES = 32 << 10
"""Used for a size that cannot be measured: 16384 numbers of 16 bits."""


class ImageCost(NamedTuple):
    """The cost of a model's images.

    Attributes:
        layers, row_cost, cache_rows, token_seconds, step_seconds, interrupts: see
            :class:`~tgi_cli.config.EncoderLimits`.
        row_bytes: bytes of the features of a row.
        activation_bytes: upper bound of the memory for encoding the largest image, without its
            features.
    """

    layers: int
    row_cost: float
    cache_rows: int
    row_bytes: int
    activation_bytes: int
    token_seconds: float
    step_seconds: float
    interrupts: bool

    @property
    def total_bytes(self) -> int:
        """Upper bound of the memory of images, without weights and KV cache."""
        return self.activation_bytes + self.cache_rows * self.row_bytes

    @property
    def limits(self) -> EncoderLimits:
        """The limits for the scheduler."""
        return EncoderLimits(
            layers=self.layers,
            row_cost=self.row_cost,
            cache_rows=self.cache_rows,
            token_seconds=self.token_seconds,
            step_seconds=self.step_seconds,
            interrupts=self.interrupts,
        )


def max_image_rows(config: EngineConfig) -> int:
    """The most tokens that an image should take; images of some families are larger at any size."""
    return max(1, config.max_input_tokens // IMAGE_SHARE)


class ImageCostMeter:
    """Measures what images cost. All shards do the same, with the same result.

    Args:
        config: as resolved.
        tower: tower of the model.
        encoder: runs it.
        run: runs a step to its end, over a small cache.
        shard: this process's share of the model.
    """

    def __init__(
        self,
        config: EngineConfig,
        tower: VisionTower,
        encoder: ImageEncoder,
        run: Callable[[Step], object],
        shard: Shard,
    ) -> None:
        self._config = config
        self._tower = tower
        self._encoder = encoder
        self._run = run
        self._shard = shard
        self._device = encoder.device

    def measure(self) -> ImageCost:
        """Encode the smallest and the largest image that the limits allow.

        Raises:
            OutOfMemoryError: the largest image does not fit.
        """
        meter = PeakMeter(self._device)
        problem = ""
        rows, row_bytes, seconds = max_image_rows(self._config), GUESSED_ROW_BYTES, 0.0
        try:
            rows, row_bytes, seconds = self._encode_largest()
        except OutOfMemoryError as error:
            remedy = "lower --max-input-tokens: images take a quarter of it at most"
            raise OutOfMemoryError(error.cause, remedy) from error
        except Exception as error:  # of a model's own code, at sizes that it may not be made for
            problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        activations = -self._shard.smallest(-meter.read())
        row_cost = GUESSED_ROW_COST
        prompt, step_seconds = self._step_seconds()
        tokens = prompt_step(self._config, TIMED_TOKENS).num_tokens
        token_seconds = prompt / tokens
        if self._shard.smallest(int(not problem)):
            row_cost = max(1e-3, self._longest(seconds / rows / token_seconds))
        elif self._shard.leads:
            log.warning("the cost of images is guessed, as it cannot be measured: %s", problem)
        layers = max(1, self._tower.parts)
        cache_rows = self._shard.smallest(max(rows, CACHE_BYTES // row_bytes))
        if tokens > 1 and prompt > step_seconds:  # beside others: each more token of a step
            token_seconds = (prompt - step_seconds) / (tokens - 1)
        return ImageCost(
            layers,
            row_cost,
            cache_rows,
            row_bytes,
            activations,
            token_seconds=self._longest(token_seconds),
            step_seconds=self._longest(step_seconds),
            interrupts=self._device.type == "cpu",
        )

    def _encode_largest(self) -> tuple[int, int, float]:
        """Rows of the largest image, bytes of the features of a row, and the seconds it takes."""
        smallest = self._tower.largest(1)
        largest = self._tower.largest(max_image_rows(self._config))
        found, row_bytes, seconds = self._encode(smallest)
        times = _numbers(largest) / _numbers(smallest)
        if self._device.type == "cpu" and times > 1 and self._tower.calls(largest) > TIMED_LAYERS:
            return math.ceil(found * times), row_bytes, self._time_layers(largest)
        if self._device.type != "cpu" or times > 1:
            self._encode(largest)  # with what happens once
            found, row_bytes, seconds = self._encode(largest)
        return found, row_bytes, seconds

    def _encode(self, tensors: Mapping[str, Any]) -> tuple[int, int, float]:
        """Encode an image; returns its rows, the bytes of each, and the seconds."""
        began = time.perf_counter()
        try:
            self._encoder.begin(0, tensors)
            self._encoder.advance(0, None)
            features = self._encoder.features(0)
        finally:
            self._encoder.forget(0)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - began
        rows = len(features.rows)
        size = sum(level.nbytes for level in (features.rows, *features.deepstack))
        return rows, -(-size // rows), seconds

    def _time_layers(self, tensors: Mapping[str, Any]) -> float:
        """Seconds of an image, estimated from its first layers."""
        times = []
        try:
            self._encoder.begin(0, tensors)
            for _ in range(TIMED_LAYERS):
                began = time.perf_counter()
                self._encoder.advance(0, 1)
                times.append(time.perf_counter() - began)
            failure = self._encoder.failure(0)
        finally:
            self._encoder.forget(0)
        if failure is not None:
            raise failure
        # What comes before the layers is in the first part.
        return times[0] + times[-1] * (self._tower.calls(tensors) - 1)

    def _step_seconds(self) -> tuple[float, float]:
        """Seconds of a prompt's step, and of a single token's, after a first run of each."""
        times = []
        for tokens in (TIMED_TOKENS, TIMED_TOKENS, 1, 1):
            began = time.perf_counter()
            self._run(prompt_step(self._config, tokens))
            times.append(max(time.perf_counter() - began, 1e-9))
        return times[1], times[3]

    def _longest(self, value: float) -> float:
        """The largest of all shards' values, to nine decimals."""
        return -self._shard.smallest(-round(value * 1e9)) / 1e9


def _numbers(image: Mapping[str, Any]) -> int:
    """How many numbers the pixels of an image are."""
    return math.prod(image["pixel_values"].shape)
