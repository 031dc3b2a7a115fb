"""Images on the device: a model's encoder, its features by key, and the rows that steps use.

Features are of one image a call, so that they do not depend on what else is encoded. Every shard
has the whole encoder, and runs it for itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.engine.image_slices import NOTHING_ENCODED, EncodeReport, EncodeSlice
from tgi_cli.engine.step import Step
from tgi_cli.models.base import ImageRows
from tgi_cli.models.vision import ImageFeatures, VisionTower
from tgi_cli.worker.paused_calls import PausedCalls
from tgi_cli.worker.sizing.memory import out_of_memory_as_error
from tgi_cli.worker.upload import Uploader

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StepImages:
    """The images that a step has encoded and uses.

    Attributes:
        rows: of its tokens; None if none stands for an image that is encoded.
        report: outcomes of its images.
    """

    rows: ImageRows | None
    report: EncodeReport


class ImageEncoder:
    """Encodes images in the slices that steps ask for, and keeps the features.

    Args:
        tower: of the model.
        device: of the model.
        shard: this process's share of the model: shards agree on which images have failed.
        threads: torch's threads for the tower on a CPU; None for its default.

    Attributes:
        device: as given.
    """

    def __init__(
        self,
        tower: VisionTower,
        device: torch.device,
        shard: Shard = ALONE,
        threads: int | None = None,
    ) -> None:
        self._tower = tower
        self.device = device
        self._shard = shard
        self._upload = Uploader(device)
        self._calls = PausedCalls(tower.layers, device, threads, tower.pauses)
        self._current: int | None = None
        self._parts_done = 0
        self._num_calls = 0
        self._features: dict[int, ImageFeatures] = {}
        self._failed: dict[int, Exception] = {}

    @property
    def held_rows(self) -> int:
        """Rows of features that are held."""
        return sum(len(features.rows) for features in self._features.values())

    def run(self, step: Step) -> StepImages:
        """Forget and encode images as a step requests, and gather the rows of its tokens.

        Slices that time bounds wait for :meth:`run_timed`. An image that cannot be encoded has a
        cause in the report, and no rows.
        """
        for key in step.dropped_images:
            self.forget(key)
        report = NOTHING_ENCODED
        planned = [part for part in step.encodes if part.seconds is None]
        if planned:
            began = time.perf_counter()
            for part in planned:
                self.encode(part)
            report = EncodeReport(seconds=self._since(began))
        if self._failed:
            ended = {part.key for part in step.encodes if part.last}
            ended |= {span.key for span in step.images}
            failed = {key: _cause(self._failed[key]) for key in ended if key in self._failed}
            report = replace(report, failed=failed)
        return StepImages(self._rows(step), report)

    def run_timed(self, step: Step, began: float, report: EncodeReport) -> EncodeReport:
        """Run the slices of a step that time bounds, once its tokens are chosen.

        Args:
            step: which :meth:`run` has seen.
            began: time at which it was launched, of :func:`time.perf_counter`.
            report: of :meth:`run`.

        Returns:
            The report, with these slices.
        """
        timed = [part for part in step.encodes if part.seconds is not None]
        if not timed:
            return report
        now = time.perf_counter()
        layers: dict[int, int] = {}
        for part in timed:
            assert part.seconds is not None
            left = began + part.rest_seconds + part.seconds - time.perf_counter()
            layers[part.key] = self.encode_for(part, left)
        return replace(report, layers=layers, seconds=report.seconds + self._since(now))

    def _since(self, began: float) -> float:
        """Seconds that slices took; 0 if the device runs asynchronously to the host."""
        return time.perf_counter() - began if self.device.type == "cpu" else 0.0

    def forget(self, key: int) -> None:
        """Drop an image, encoded or not. Unknown keys are ignored."""
        if self._current == key:
            self._calls.cancel()
            self._current = None
        self._features.pop(key, None)
        self._failed.pop(key, None)

    def encode(self, part: EncodeSlice) -> None:
        """Run a slice. What the encoder raises becomes the image's failure."""
        if part.tensors is not None:
            self.begin(part.key, part.tensors, part.rows)
        self._advance_parts(part)
        if not part.last:
            return
        # Where one shard has no features, none may use its own.
        if not self._shard.smallest(int(part.key in self._features)):
            self._features.pop(part.key, None)
            lost = RuntimeError("it was not encoded on every shard")
            self._failed.setdefault(part.key, lost)

    def encode_for(self, part: EncodeSlice, seconds: float) -> int:
        """Run a slice for ``seconds``; returns the parts of the whole run that are done by then.

        All of them, if nothing is left: then the image's last slice may follow.
        """
        if part.tensors is not None:
            self.begin(part.key, part.tensors, part.rows)
        if self._current == part.key and self._calls.is_running:
            if self._calls.resume_for(seconds):
                self._end(part.key)
            else:
                done = max(0, self._calls.layers_begun - 1) * self._tower.parts
                self._parts_done = min(done // self._num_calls, self._tower.parts - 1)
                return self._parts_done
        return self._tower.parts

    def begin(self, key: int, tensors: Mapping[str, Any], rows: int | None = None) -> None:
        """Give an image to the encoder, without running it.

        Args:
            key: for its features.
            tensors: numpy arrays or tensors, the arguments of the encoder.
            rows: that it must have; None for any number.
        """
        self._current = key
        self._parts_done = 0
        self._num_calls = self._tower.calls(tensors)
        self._calls.start(lambda: self._encode(tensors, rows))

    def _advance_parts(self, part: EncodeSlice) -> None:
        """Run the layers that a slice's parts of the whole run are, of the image in the encoder."""
        if part.last or self._current != part.key:
            self.advance(part.key, None)
            return
        self._parts_done += part.layers
        wanted = self._parts_done * self._num_calls // self._tower.parts
        layers = wanted - self._calls.layers_begun
        if layers > 0:
            self.advance(part.key, layers)

    def advance(self, key: int, layers: int | None) -> None:
        """Run the next calls of layers of an image's run, or all that are left, if it runs."""
        running = self._current == key and self._calls.is_running
        if running and self._calls.resume(layers):
            self._end(key)

    def _end(self, key: int) -> None:
        """The run over an image has ended."""
        self._current = None
        try:
            with out_of_memory_as_error():
                self._features[key] = cast(ImageFeatures, self._calls.result())
        except Exception as error:  # whatever it is, it is this image's alone
            log.warning("an image cannot be encoded", exc_info=error)
            self._failed[key] = error

    def features(self, key: int) -> ImageFeatures:
        """The features of an encoded image.

        Raises:
            Exception: what the encoder raised.
            KeyError: the image is not encoded.
        """
        if key in self._failed:
            raise self._failed[key]
        return self._features[key]

    def failure(self, key: int) -> Exception | None:
        """Why an image could not be encoded, or None."""
        return self._failed.get(key)

    def close(self) -> None:
        """End the encoder's thread. May be called twice."""
        self._calls.close()

    def _encode(self, tensors: Mapping[str, Any], rows: int | None) -> ImageFeatures:
        inputs = {name: _tensor(value).to(self.device) for name, value in tensors.items()}
        features = self._tower.encode(inputs, rows)
        found = len(features.rows)
        if rows not in (None, found) or any(len(level) != found for level in features.deepstack):
            raise ValueError(f"the encoder gave {found} rows for an image of {rows}")
        return features

    def _rows(self, step: Step) -> ImageRows | None:
        """The features of a step's tokens, in their order, without those of failed images."""
        spans = [span for span in step.images if span.key in self._features]
        if not spans:
            return None
        begins = np.cumsum([0, *step.counts])
        indices = [
            np.arange(span.count, dtype=np.int64) + (begins[span.index] + span.offset)
            for span in spans
        ]
        (on_device,) = self._upload(np.concatenate(indices))
        parts: list[list[Tensor]] = []
        for span in spans:
            features = self._features[span.key]
            levels = (features.rows, *features.deepstack)
            parts.append([level[span.first : span.first + span.count] for level in levels])
        rows, *deepstack = (
            level[0] if len(level) == 1 else torch.cat(level) for level in zip(*parts, strict=True)
        )
        return ImageRows(on_device, rows, tuple(deepstack))


def _tensor(value: Any) -> Tensor:
    """An array on the host; unsigned 16-bit numbers are the bits of bfloat16."""
    if isinstance(value, Tensor):
        return value
    array = np.ascontiguousarray(value)
    if not array.flags.writeable:  # as it came over a socket
        array = array.copy()
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _cause(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
