"""The arguments of a program for C++: structures of ``cpp/program.h``, and a step's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from torch import Tensor


class OpKind(IntEnum):
    """Operations, as ``cpp/program.h`` numbers them."""

    NORM = 0
    LINEAR = 1
    ROTATE = 2
    ATTEND = 3
    CONVOLVE = 4
    RECUR = 5
    GATE = 6
    HEADS = 7
    LATENT = 8
    MULTIPLY = 9
    SPARSE = 10
    MIX = 11
    EXPERTS = 12


class ViewArgs(Structure):
    """``View`` of ``cpp/program.h``."""

    _fields_ = (("buffer", c_int32), ("offset", c_int32))


class MixArgs(Structure):
    """``Mix`` of ``cpp/streams.h``."""

    _fields_ = (
        ("streams", c_int64),
        ("sources", c_int64),
        ("width", c_int64),
        ("plus", c_float),
    )


class OpArgs(Structure):
    """``Op`` of ``cpp/program.h``."""

    _fields_ = (
        ("kind", c_int32),
        ("input", ViewArgs),
        ("output", ViewArgs),
        ("others", ViewArgs * 4),
        ("residual", ViewArgs),
        ("norm", c_int32),
        ("width", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("eps", c_float),
        ("scale", c_float),
        ("matrix", c_void_p),
        ("linear_bias", c_void_p),
        ("epilogue", c_int32),
        ("activation", c_int32),
        ("layer", c_int32),
        ("rope", c_int32),
        ("rotated", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("value_dim", c_int32),
        ("values_from_keys", c_int32),
        ("value_weight", c_void_p),
        ("window", c_int64),
        ("chunk", c_int64),
        ("spans", c_int64),
        ("attention_scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
        ("attention_bias", c_void_p),
        ("distances", c_int64),
        ("convolution", c_void_p),
        ("recurrence", c_void_p),
        ("gate", c_void_p),
        ("head_input", c_int64),
        ("head_output", c_int64),
        ("mix", c_void_p),
        ("mixture", c_void_p),
    )


class RunArgs(Structure):
    """``Run`` of ``cpp/program.h``."""

    _fields_ = (
        ("first", c_int64),
        ("last", c_int64),
        ("tokens", c_int64),
        ("callers", c_void_p * 3),
        ("step", c_void_p),
        ("caches", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("temperatures", c_void_p),
        ("slots", c_void_p),
        ("states", c_void_p),
        ("seconds", POINTER(c_double)),
        ("threads", c_int32),
    )


class NormKind(IntEnum):
    """As ``cpp/program.h`` numbers them."""

    NONE = 0
    RMS = 1
    LAYER = 2


@dataclass(slots=True, kw_only=True)
class ProgramInputs:
    """The inputs of a program's parts in one step.

    Attributes:
        step, caches: of the attention backend that was planned for the step.
        ropes: what :func:`rope_pointers` makes of the step's positions.
        slots: slots of the step's states, of models that have some.
        states: an array of pointers, two per layer with states: of its convolution, and of its
            recurrence.
        per_layer: each layer's own embeddings of the tokens, [T, layers, width], of models that
            have some.
    """

    step: Structure
    caches: Any
    ropes: RopePointers
    slots: Structure | None = None
    states: Any = None
    per_layer: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RopePointers:
    """Arrays of pointers, one per rope each; null where it has no such tensor."""

    cosines: Any
    sines: Any
    temperatures: Any
    kept: Any
    """The tensors that they point to."""


def rope_pointers(ropes: Sequence[tuple[Tensor, Tensor] | Tensor]) -> RopePointers:
    """Pointers to cosines and sines of a step's positions, or to factors of queries; float32."""
    pointers = c_void_p * len(ropes)

    def addresses(part: int) -> Any:
        return pointers(
            *(rope[part].data_ptr() if isinstance(rope, tuple) else None for rope in ropes)
        )

    factors = (None if isinstance(rope, tuple) else rope.data_ptr() for rope in ropes)
    return RopePointers(addresses(0), addresses(1), pointers(*factors), ropes)
