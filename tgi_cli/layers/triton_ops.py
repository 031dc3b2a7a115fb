"""The operations of :mod:`tgi_cli.layers.ops` as Triton kernels, each one pass over memory.

Tensors are of bfloat16, float16 or float32, contiguous in their last dimension; computed is in
float32. No launch waits for the device, and its grid depends on shapes alone: a CUDA graph can
hold them. Norms and gates, which products follow, let these begin to fetch their weights
(:mod:`tgi_cli.device.dependent_launch`). The language:
https://triton-lang.org/main/python-api/triton.language.html
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_cli.attention.triton_cache import how_to_read, narrowed
from tgi_cli.device.dependent_launch import signal_dependents
from tgi_cli.device.triton_launch import cached_launches


@cached_launches
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _norm_kernel(
    x: tl.tensor,  # rows of SIZE, INNER of them side by side
    residual: tl.tensor,  # likewise; becomes x + residual
    weight: tl.tensor,  # [SIZE], or [INNER, SIZE] with weight_stride
    bias: tl.tensor,  # [SIZE]
    normed: tl.tensor,  # [rows, SIZE]
    outer_stride: int,
    inner_stride: int,
    residual_stride: int,
    weight_stride: int,
    eps: float,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # the power of 2 that is not below SIZE
    ADD: tl.constexpr,
    CENTER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    signal_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    start = (row // INNER) * outer_stride + (row % INNER) * inner_stride
    stored = tl.load(x + start + columns, mask=inside, other=0.0)
    if ADD:
        place = residual + row * residual_stride + columns
        before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        # The norm sees the sum as the next layer will: rounded.
        stored = (stored.to(tl.float32) + before).to(residual.dtype.element_ty)
        tl.store(place, stored, mask=inside)
    values = stored.to(tl.float32)
    if CENTER:
        values = tl.where(inside, values - tl.sum(values, 0) / SIZE, 0.0)
    values *= tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    place = weight + (row % INNER) * weight_stride + columns
    factor = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    values *= factor
    if HAS_BIAS:
        values += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * SIZE + columns, values.to(normed.dtype.element_ty), mask=inside)


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    center: bool = False,
) -> Tensor:
    size = x.shape[-1]
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return normed
    heads = x.dim() == 3
    block = triton.next_power_of_2(size)
    _norm_kernel[(x.numel() // size,)](
        x,
        x if residual is None else residual,
        weight,
        weight if bias is None else bias,
        normed,
        x.stride(0),
        x.stride(1) if heads else 0,
        0 if residual is None else residual.stride(0),
        weight.stride(0) if weight.dim() == 2 else 0,
        eps,
        INNER=x.shape[1] if heads else 1,
        SIZE=size,
        BLOCK=block,
        ADD=residual is not None,
        CENTER=center,
        HAS_BIAS=bias is not None,
        num_warps=_warps(block),
    )
    return normed


def _warps(elements: int) -> int:
    """As many as leave each thread 16 elements of a block.

    Below 8 threads could share an element, and one might read it after another had written it.
    """
    return min(max(elements // 512, 1), 16)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As :func:`tgi_cli.layers.ops.rms_norm`; x [T, size] or a view [T, heads, size]."""
    return _norm(x, None, weight, None, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of ``x + residual``, which overwrites ``residual``; both [T, size]."""
    return _norm(x, residual, weight, None, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """The norm of ``x + residual``, which overwrites ``residual``; both [T, size]."""
    return _norm(x, residual, weight, bias, eps, center=True)


@cached_launches
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rotate_kernel(
    heads: tl.tensor,  # [T, HEADS, 2 HALF + REST]
    weight: tl.tensor,  # [HEADS, 2 HALF + REST], or one per head that is turned
    cosines: tl.tensor,  # [T, 2 HALF]
    sines: tl.tensor,
    key_cache: tl.tensor,  # [slots, KV_HEADS, 2 HALF + REST]
    value_cache: tl.tensor,
    slots: tl.tensor,  # int64 [T]
    key_factor: float,  # with FP8: what is multiplied by it before it is rounded
    value_factor: float,
    token_stride: int,
    head_stride: int,
    cosine_stride: int,
    sine_stride: int,
    weight_stride: int,
    eps: float,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,  # the last of the heads: so many keys, so many values; 0: none
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,  # powers of 2 that are not below these
    BLOCK_REST: tl.constexpr,
    NORM: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    numbers = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    known = (numbers < HEADS)[:, None]
    turned = (numbers < HEADS - KV_HEADS)[:, None]  # queries and keys
    starts = heads + token * token_stride + numbers[:, None] * head_stride
    columns = tl.arange(0, BLOCK_HALF)
    inside = columns < HALF
    mask = known & inside[None, :]
    first = starts + columns[None, :]
    second = first + HALF
    a = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(second, mask=mask, other=0.0).to(tl.float32)
    if REST > 0:
        others = tl.arange(0, BLOCK_REST)
        others_mask = known & (others < REST)[None, :]
        others_at = starts + 2 * HALF + others[None, :]
        rest = tl.load(others_at, mask=others_mask, other=0.0).to(tl.float32)
    if NORM:
        weights = weight + numbers[:, None] * weight_stride
        squares = tl.sum(a * a + b * b, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / (2 * HALF + REST) + eps)[:, None]
        scale = tl.where(turned, scale, 1.0)
        weights_at = weights + columns[None, :]
        a *= scale * tl.load(weights_at, mask=mask & turned, other=1.0).to(tl.float32)
        b *= scale * tl.load(weights_at + HALF, mask=mask & turned, other=1.0).to(tl.float32)
        if REST > 0:
            rest *= scale * tl.load(
                weights + 2 * HALF + others[None, :], mask=others_mask & turned, other=1.0
            ).to(tl.float32)
    cosine = cosines + token * cosine_stride + columns
    sine = sines + token * sine_stride + columns
    first_cosine = tl.load(cosine, mask=inside, other=0.0).to(tl.float32)[None, :]
    second_cosine = tl.load(cosine + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    first_sine = tl.load(sine, mask=inside, other=0.0).to(tl.float32)[None, :]
    second_sine = tl.load(sine + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    new_a = tl.where(turned, a * first_cosine + b * first_sine, a).to(heads.dtype.element_ty)
    new_b = tl.where(turned, b * second_cosine + a * second_sine, b).to(heads.dtype.element_ty)
    in_place = (numbers < HEADS - 2 * KV_HEADS)[:, None]
    tl.store(first, new_a, mask=mask & in_place)
    tl.store(second, new_b, mask=mask & in_place)
    if NORM and REST > 0:
        tl.store(others_at, rest.to(heads.dtype.element_ty), mask=others_mask & in_place)
    if KV_HEADS > 0:
        slot = tl.load(slots + token)
        if slot >= 0:
            factor = tl.where(turned, key_factor, value_factor)
            kept_a = narrowed(new_a.to(tl.float32) * factor, FP8) if FP8 > 0 else new_a
            kept_b = narrowed(new_b.to(tl.float32) * factor, FP8) if FP8 > 0 else new_b
            key_numbers = numbers - (HEADS - 2 * KV_HEADS)
            is_key = turned & (key_numbers >= 0)[:, None]
            start = slot * KV_HEADS * (2 * HALF + REST)
            at = start + key_numbers[:, None] * (2 * HALF + REST)
            key_at = key_cache + at
            value_at = value_cache + at - KV_HEADS * (2 * HALF + REST)
            tl.store(key_at + columns[None, :], kept_a, mask=mask & is_key)
            tl.store(key_at + HALF + columns[None, :], kept_b, mask=mask & is_key)
            tl.store(value_at + columns[None, :], kept_a, mask=mask & (turned == 0))
            tl.store(value_at + HALF + columns[None, :], kept_b, mask=mask & (turned == 0))
            if REST > 0:
                new_rest = rest.to(heads.dtype.element_ty)
                kept_rest = new_rest
                if FP8 > 0:
                    kept_rest = narrowed(new_rest.to(tl.float32) * factor, FP8)
                rest_at = 2 * HALF + others[None, :]
                tl.store(key_at + rest_at, kept_rest, mask=others_mask & is_key)
                tl.store(value_at + rest_at, kept_rest, mask=others_mask & (turned == 0))


def _rotate(
    heads: Tensor,
    weight: Tensor | None,
    eps: float,
    cosines: Tensor,
    sines: Tensor,
    caches: tuple[Tensor, Tensor, Tensor] | None = None,
    factors: tuple[float, float] = (1.0, 1.0),
) -> None:
    tokens, count, dims = heads.shape
    half = cosines.shape[-1] // 2
    if not tokens:
        return
    key_cache, value_cache, slots = (heads, heads, heads) if caches is None else caches
    fp8 = how_to_read(key_cache.dtype, casts=False)
    if fp8:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    rest = dims - 2 * half
    block_half = triton.next_power_of_2(half)
    block_rest = triton.next_power_of_2(max(rest, 1))
    # The wider part decides how much a program keeps in registers, the narrower one how many
    # threads there are without two for an element.
    wide = max(block_half, block_rest)
    narrow = min(block_half, block_rest) if rest else block_half
    block_heads = min(triton.next_power_of_2(count), max(1024 // wide, 1))
    _rotate_kernel[(tokens, triton.cdiv(count, block_heads))](
        heads,
        heads if weight is None else weight,
        cosines,
        sines,
        key_cache,
        value_cache,
        slots,
        *factors,
        heads.stride(0),
        heads.stride(1),
        cosines.stride(0),
        sines.stride(0),
        0 if weight is None else weight.stride(0),
        eps,
        HEADS=count,
        KV_HEADS=0 if caches is None else key_cache.shape[2],
        HALF=half,
        REST=rest,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        BLOCK_REST=block_rest,
        NORM=weight is not None,
        FP8=fp8,
        num_warps=_warps(block_heads * narrow),
    )


def rotate_(heads: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """As :func:`tgi_cli.layers.ops.rotate_`."""
    _rotate(heads, None, 0.0, cosines, sines)


def norm_rotate_(heads: Tensor, weight: Tensor, eps: float, cosines: Tensor, sines: Tensor) -> None:
    """As :func:`tgi_cli.layers.ops.norm_rotate_`."""
    _rotate(heads, weight, eps, cosines, sines)


def norm_rotate_write(
    qkv: Tensor,
    weight: Tensor | None,
    eps: float,
    cosines: Tensor,
    sines: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    factors: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Norm (with a ``weight``) and rotate queries and keys, and put keys and values into a cache.

    ``qkv`` is [T, heads + 2 kv_heads, head_dim]; of it the queries alone are overwritten.
    ``weight``, ``cosines`` and ``sines`` are as :func:`tgi_cli.layers.ops.norm_rotate_` has them.
    Caches are :class:`~tgi_cli.attention.PagedAttention`'s of a layer, contiguous, of 8-bit floats
    or ``qkv``'s dtype; ``slots`` (int64 [T]) its ``step_slots``, negative ones are left out.
    8-bit floats are made of keys and values multiplied by ``factors``.
    """
    _rotate(qkv, weight, eps, cosines, sines, (key_cache, value_cache, slots), factors)


FORMULAS = {
    **{name: name for name in ("silu", "relu", "relu2", "tanh", "sigmoid", "gelu", "quick_gelu")},
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""What the kernel calls an activation."""


@cached_launches
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gated_kernel(
    gate_up: tl.tensor,  # [T, 2 SIZE]
    product: tl.tensor,  # [T, SIZE]
    stride: int,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMULA: tl.constexpr,
) -> None:
    signal_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    place = gate_up + row * stride + columns
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + SIZE, mask=inside, other=0.0).to(tl.float32)
    # tanh(y) = 2 sigmoid(2 y) - 1, which makes the gelu of 1 + tanh(y) a product as well.
    if FORMULA == "silu":
        y = x * tl.sigmoid(x)
    elif FORMULA == "gelu_tanh":
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif FORMULA == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FORMULA == "quick_gelu":
        y = x * tl.sigmoid(1.702 * x)
    elif FORMULA == "sigmoid":
        y = tl.sigmoid(x)
    elif FORMULA == "tanh":
        y = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    elif FORMULA == "relu2":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif FORMULA == "clamped_swiglu":
        x = tl.where(x > 7.0, 7.0, x)  # NaN stays
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        y = x * tl.sigmoid(1.702 * x)
    else:
        tl.static_assert(FORMULA == "relu")
        y = tl.maximum(x, 0.0)
    tl.store(product + row * SIZE + columns, (y * up).to(product.dtype.element_ty), mask=inside)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """As :func:`tgi_cli.layers.ops.gated`."""
    return _gated(gate_up, FORMULAS[activation])


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """As :func:`tgi_cli.layers.experts.clamped_swiglu`."""
    return _gated(gate_up, "clamped_swiglu")


def _gated(gate_up: Tensor, formula: str) -> Tensor:
    rows = gate_up.flatten(0, -2)
    size = gate_up.shape[-1] // 2
    product = gate_up.new_empty(*gate_up.shape[:-1], size)
    if not product.numel():
        return product
    block = min(triton.next_power_of_2(size), 1024)
    _gated_kernel[(rows.shape[0], triton.cdiv(size, block))](
        rows,
        product,
        rows.stride(0),
        SIZE=size,
        BLOCK=block,
        FORMULA=formula,
        num_warps=max(block // 256, 1),
    )
    return product


def probe() -> None:
    """Compile and launch a kernel. Raises what Triton raises where it cannot."""
    x = torch.ones(1, 16, device="cuda")
    rms_norm(x, x[0], 1e-6)
