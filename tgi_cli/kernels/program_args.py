"""What a program hands to C++: the structures of ``cpp/program.h``."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum


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


class ViewArgs(Structure):
    """``View`` of ``cpp/program.h``."""

    _fields_ = (("buffer", c_int32), ("offset", c_int32))


class OpArgs(Structure):
    """``Op`` of ``cpp/program.h``."""

    _fields_ = (
        ("kind", c_int32),
        ("input", c_int32),
        ("input_offset", c_int32),
        ("output", c_int32),
        ("output_offset", c_int32),
        ("residual", c_int32),
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
        ("window", c_int64),
        ("chunk", c_int64),
        ("attention_scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
        ("attention_bias", c_void_p),
        ("distances", c_int64),
        ("others", ViewArgs * 4),
        ("head_input", c_int64),
        ("head_output", c_int64),
        ("convolution", c_void_p),
        ("recurrence", c_void_p),
        ("gate", c_void_p),
    )


class RunArgs(Structure):
    """``Run`` of ``cpp/program.h``."""

    _fields_ = (
        ("first", c_int64),
        ("last", c_int64),
        ("tokens", c_int64),
        ("residual", c_void_p),
        ("output", c_void_p),
        ("step", c_void_p),
        ("caches", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
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
