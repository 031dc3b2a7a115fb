"""The parts of images that a step encodes, the report on them, and the tokens of images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class EncodeSlice:
    """A part of the encoder's run over an image.

    The first slice brings the image's ``tensors`` (numpy arrays, by the names of the encoder's
    arguments). Each runs the next ``layers`` of the encoder, the ``last`` one whatever is left;
    another image begins after it. ``key`` names the ``rows`` of features that it gives, until a
    step drops them; a key is never used again.

    With ``seconds``, it runs after the step's tokens instead, as far as that time goes, and the
    result says how far (:class:`EncodeReport`). The tokens are expected to take ``rest_seconds``:
    the slice gets the time that they leave of this, and does without what they take beyond it. So
    the step lasts as long as both together, whatever its tokens take.
    """

    key: int
    rows: int
    layers: int
    last: bool
    tensors: Mapping[str, Any] | None = None
    seconds: float | None = None
    rest_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Tokens of entry ``index`` that stand for an image: ``count`` after the first ``offset``.

    They stand for the rows of the features ``key`` from ``first`` on.
    """

    index: int
    offset: int
    count: int
    key: int
    first: int


@dataclass(frozen=True, slots=True)
class EncodeReport:
    """The outcomes of the images that a step encodes or uses, by their keys.

    Attributes:
        failed: causes for images that could not be encoded, and that the step has ended or used.
        layers: layers that have run so far, for slices that were bounded by time; all of them only
            if nothing is left to run.
        seconds: time that the slices took; 0 if the device runs asynchronously to the host.
    """

    failed: Mapping[int, str] = field(default_factory=dict)
    layers: Mapping[int, int] = field(default_factory=dict)
    seconds: float = 0.0


NOTHING_ENCODED = EncodeReport()
