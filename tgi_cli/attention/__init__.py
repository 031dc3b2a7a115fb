"""Paged attention per device behind one small interface."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from importlib import import_module

import torch

from tgi_cli.attention.base import AttentionMetadata, PagedAttention
from tgi_cli.attention.spec import KVScales, KVSpec, Spans
from tgi_cli.attention.states import StateCache, StateMetadata, StateSpec, StateTensor

log = logging.getLogger(__name__)

__all__ = [
    "BACKENDS",
    "AttentionMetadata",
    "KVScales",
    "KVSpec",
    "PagedAttention",
    "Spans",
    "StateCache",
    "StateMetadata",
    "StateSpec",
    "StateTensor",
    "attention_name",
    "create_attention",
]

BACKENDS = {
    "torch": "tgi_cli.attention.reference:ReferenceAttention",
    "cpu": "tgi_cli.attention.cpu_torch:CpuAttention",
    "native": "tgi_cli.attention.cpu_cpp:CppAttention",
    "triton": "tgi_cli.attention.triton:TritonAttention",
    "flashinfer": "tgi_cli.attention.flashinfer:FlashInferAttention",
}
"""The class of each backend; its module is imported when it is needed."""


def create_attention(
    kind: str | None,
    specs: Sequence[KVSpec],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    cache_dtype: torch.dtype | None = None,
    states: Sequence[StateSpec] = (),
) -> PagedAttention:
    """The backend named ``kind``. Default: the fastest one of the device.

    ``cache_dtype`` is the dtype of cached keys and values: ``dtype`` (None), float8_e4m3fn or
    float8_e5m2. ``states`` are the model's layers with a recurrent state.

    Raises:
        ValueError: no backend of that name, or no cache of that dtype.
    """
    if kind is None:
        kind = "torch"
        if device.type == "cpu":
            kind = "native" if _has_cpp(specs, block_size, dtype, cache_dtype) else "cpu"
        elif device.type == "cuda" and has_triton():
            kind = "triton"
    if kind not in BACKENDS:
        raise ValueError(f"no attention backend {kind!r}; one of: {', '.join(sorted(BACKENDS))}")
    module, _, name = BACKENDS[kind].partition(":")
    backend: type[PagedAttention] = getattr(import_module(module), name)
    attention = backend(specs, block_size, dtype, device, cache_dtype)
    attention.states = StateCache(states, device) if states else None
    return attention


def attention_name(attention: PagedAttention) -> str:
    """The name of an attention backend."""
    here = f"{type(attention).__module__}:{type(attention).__name__}"
    return next(name for name, path in BACKENDS.items() if path == here)


def _has_cpp(
    specs: Sequence[KVSpec], block_size: int, dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> bool:
    from tgi_cli.attention.cpu_cpp import CppAttention
    from tgi_cli.kernels import cpp_library

    return cpp_library() is not None and CppAttention.supports(
        specs, block_size, dtype, cache_dtype
    )


@cache
def has_triton() -> bool:
    """Whether Triton can compile here; cached, as the check takes a while."""
    from tgi_cli.kernels import custom_kernels_enabled

    if not custom_kernels_enabled():
        return False
    try:
        from tgi_cli.attention.triton import probe

        probe()
    except ImportError as error:
        log.warning("attention runs without Triton, slowly: %s", error)
        return False
    # Triton compiles on the machine that runs it, which may lack a C compiler, Python's headers,
    # an assembler or support for the GPU: each has an error class of its own.
    except Exception as error:
        log.warning("Triton cannot compile here, attention runs without it, slowly: %s", error)
        return False
    return True
