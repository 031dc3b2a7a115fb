"""Chooses how dense weights are multiplied with few rows on a GPU: by cuBLAS, or by our kernel.

Each shape of weights is measured with the model's own ones, one after the other, so that the caches
hold as little of them as when a model is served; each product is in a CUDA graph behind a kernel
that computes its input. Our kernel is measured as it is launched usually and, where the GPU can,
begun before that kernel has ended. Its results are compared with cuBLAS' first.

What is chosen for a class of rows stays. It is a matter of each shard, except for weights that all
shards have whole: their results have to be the same on all of them, and cuBLAS computes these.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from tgi_cli.device.distributed import Shard
from tgi_cli.kernels import custom_kernels_enabled
from tgi_cli.layers import ColumnParallelLinear
from tgi_cli.layers.linear import LinearBase
from tgi_cli.models import CausalLM
from tgi_cli.quantization import Unquantized
from tgi_cli.quantization.cuda_matmul import DTYPES, triton_missing
from tgi_cli.quantization.few_rows import MAX_CLASS, FewRows
from tgi_cli.quantization.split_inputs import counters
from tgi_cli.worker.sizing.graph_timing import graph_seconds
from tgi_cli.worker.sizing.memory import release_unused_memory

log = logging.getLogger(__name__)

CLASSES = range(MAX_CLASS + 1)
PRODUCTS_PER_GRAPH = 20
GAIN = 1.03
"""By how much our kernel has to be faster, and to begin early has to be: less is noise, and what
is chosen should not change from start to start."""
TOLERANCE = 0.01
"""Norm of the difference of results relative to that of cuBLAS': both are sums in float32 that are
rounded to 16 bits."""

Way = bool | None
"""None for cuBLAS, False for our kernel, True for our kernel begun early."""
Shape = tuple[int, int, bool]
"""Outputs, inputs, and whether there is a bias."""
Seconds = Callable[[Sequence[Callable[[], Tensor]]], float]
"""Returns the time of one work of several."""

NAMES: Mapping[Way, str] = {None: "cuBLAS", False: "our kernel", True: "our kernel begun early"}


@torch.inference_mode()
def choose_products(
    model: CausalLM,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard,
    seconds: Seconds = graph_seconds,
) -> None:
    """Set ``few_rows`` of the model's dense layers, or leave all their products to cuBLAS.

    Args:
        model: with its weights.
        dtype, device: of the model.
        shard: this process's share of the model.
        seconds: measures.
    """
    if device.type != "cuda" or dtype not in DTYPES or not custom_kernels_enabled():
        return
    if triton_missing() is not None:
        return
    warn = cache(log.warning)  # of the same once
    for shape, layers in dense_layers(model, shard).items():
        times = [measure(layers, 1 << each, seconds, warn) for each in CLASSES]
        chosen = {}
        for rows_class, own in zip(CLASSES, times, strict=True):
            way = fastest(own)
            if way is not None:
                chosen[rows_class] = way
        for layer in layers:
            layer.few_rows = FewRows(chosen) if chosen else None
        if shard.leads:
            _report(shape, times)
    release_unused_memory(device)


def dense_layers(model: CausalLM, shard: Shard) -> dict[Shape, list[LinearBase]]:
    """The layers that our kernel can take, by shape."""
    found: dict[Shape, list[LinearBase]] = {}
    for layer in model.modules():
        if not isinstance(layer, LinearBase) or not isinstance(layer.method, Unquantized):
            continue
        if shard.size > 1 and _is_whole(layer):
            continue
        weight = layer.weight  # a router's may be float32
        if weight is None or weight.dtype not in DTYPES or not weight.is_contiguous():
            continue
        # A row takes a multiple of 16 bytes: wherever rows begin among others, they are aligned.
        if weight.shape[1] % 8 == 0:
            shape = (*weight.shape, layer.bias is not None)
            found.setdefault(shape, []).append(layer)
    return found


def _is_whole(layer: LinearBase) -> bool:
    """Whether every shard has all outputs of a layer, and no sum over shards follows."""
    return isinstance(layer, ColumnParallelLinear) and all(
        own == slice(0, part.size) for part, own in layer.parts.values()
    )


def measure(
    layers: Sequence[LinearBase],
    rows: int,
    seconds: Seconds,
    warn: Callable[[str], object] = log.warning,
) -> dict[Way, float]:
    """Seconds of a product, and of a gate before it, in each way that gives right results.

    Args:
        layers: of one shape.
        rows: of the input, as many as a power of 2.
        seconds: measures.
        warn: takes the reason why a way is left out.
    """
    from tgi_cli.device.dependent_launch import has_dependent_launch

    weight = layers[0].weight
    assert weight is not None
    counters(weight.device)  # not in a CUDA graph
    shape = (3, rows, 2 * weight.shape[1])
    random = torch.Generator(weight.device).manual_seed(rows)
    gates = torch.randn(shape, generator=random, dtype=weight.dtype, device=weight.device)
    ways: list[Way] = [None, False]
    if has_dependent_launch(weight.device):
        ways.append(True)
    times: dict[Way, float] = {}
    for way in ways:
        try:
            if way is not None:
                _compare(layers[0], way, gates)
            works = [
                partial(gated_product, layers[number % len(layers)], way, gates[0])
                for number in range(PRODUCTS_PER_GRAPH)
            ]
            times[way] = seconds(works)
        # Triton compiles on this machine for this GPU, and a driver may not capture such launches:
        # each has error classes of its own. cuBLAS is needed in any case.
        except Exception as error:
            if way is None:
                raise
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
            warn(f"no products of few rows by {NAMES[way]}: {problem}")
    return times


def fastest(times: Mapping[Way, float]) -> Way:
    """The way to take: the simplest one that no other beats by the least gain."""
    chosen: Way = None
    for way in (False, True):
        if way in times and times[way] * GAIN < times[chosen]:
            chosen = way
    return chosen


def gated_product(layer: LinearBase, way: Way, gates: Tensor) -> Tensor:
    """A layer's product with silu(gate) * up of ``gates`` [rows, 2 K]."""
    from tgi_cli.layers.triton_ops import gated
    from tgi_cli.quantization.triton_dense import few_rows_product

    x = gated(gates, "silu")
    assert layer.weight is not None
    if way is None:
        return linear(x, layer.weight, layer.bias)
    return few_rows_product(x, layer.weight, layer.bias, way)


def _compare(layer: LinearBase, way: Way, gates: Tensor) -> None:
    """Compare products of our kernel with cuBLAS'.

    Several without a pause: of a kernel that begins too early, one would read the input of another.

    Raises:
        RuntimeError: they differ.
    """
    ours = [gated_product(layer, way, each) for each in gates]
    for each, product in zip(gates, ours, strict=True):
        wanted = gated_product(layer, None, each).float()
        error = (product.float() - wanted).norm()
        if not error <= TOLERANCE * wanted.norm():
            raise RuntimeError("its results differ from cuBLAS'")


def _report(shape: Shape, times: Sequence[Mapping[Way, float]]) -> None:
    shown = []
    for rows_class, own in zip(CLASSES, times, strict=True):
        each = ", ".join(f"{1e6 * own[way]:.1f}" if way in own else "-" for way in NAMES)
        shown.append(f"{1 << rows_class} {each} ({NAMES[fastest(own)]})")
    log.info(
        "microseconds of products of few rows with weights of [%d, %d], and a gate before, by %s: "
        "%s",
        *shape[:2],
        ", ".join(NAMES.values()),
        "; ".join(shown),
    )
