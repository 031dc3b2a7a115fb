"""Matrix products in groups: rows sorted by expert, each group times its expert's weight.

The beginnings of the groups are known to the device alone. The host does not wait for them, and no
shape depends on them, so that a CUDA graph can contain the whole mixture of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from tgi_cli.layers import ops
from tgi_cli.quantization.tiled_weight import ExpertRows, TiledWeight


@dataclass(frozen=True, slots=True)
class Groups:
    """The P = T * k pairs of a token and one of its experts, sorted by expert.

    Pairs of one expert are in the order of their tokens.
    """

    experts: Tensor
    """[P]: the expert of each pair, ascending, in the dtype of the choice."""
    ends: Tensor
    """int32 [E]: the end of each expert's pairs; they begin at its predecessor's end."""
    pairs: Tensor
    """int64 [P]: the index of each pair in the flattened [T, k]."""
    tokens: Tensor
    """int64 [P]: the token of each pair."""

    @classmethod
    def sort(cls, chosen: Tensor, num_experts: int) -> Groups:
        """Group the pairs of tokens and experts by ``chosen``, int64 or int32 [T, k]."""
        experts, pairs = chosen.flatten().sort(stable=True)
        # Not bincount, which on CUDA waits for the device to know the number of bins.
        every = torch.arange(num_experts, dtype=chosen.dtype, device=chosen.device)
        ends = torch.searchsorted(experts, every, right=True, out_int32=True)
        return cls(experts, ends, pairs, pairs.div(chosen.shape[1], rounding_mode="floor"))


def looped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
    """The reference: one product per expert, and the host waits to learn their sizes.

    ``x`` [P, in] is sorted like ``groups``, ``weight`` is [E, out, in], ``bias`` [E, out].
    Returns [P, out], sorted like ``x``.
    """
    product = x.new_empty(x.shape[0], weight.shape[1])
    start = 0
    for expert, end in enumerate(groups.ends.tolist()):
        if end > start:
            own = None if bias is None else bias[expert]
            product[start:end] = linear(x[start:end], weight[expert], own)
        start = end
    return product


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
    """Computes :func:`looped_linear` with the device's kernel for it.

    The host waits for the device only where there is neither torch's kernel nor Triton.
    """
    if _torch_has_kernel(x, weight):
        # https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.grouped_mm.html
        # (its bias is not implemented; 2.11 has it under the private name only)
        product = torch._grouped_mm(x, weight.transpose(1, 2), offs=groups.ends)
        return product if bias is None else product.add_(bias.index_select(0, groups.experts))
    if x.is_cuda and ops.triton_kernels() is not None:  # Triton can compile here
        from tgi_cli.layers.triton_grouped import triton_grouped_linear

        rows = ExpertRows(groups.ends, groups.pairs)
        return triton_grouped_linear(x, weight, bias, rows)
    return looped_linear(x, weight, bias, groups)


def _torch_has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Elsewhere torch computes the same in a loop on the host, which a graph cannot hold."""
    return (
        x.is_cuda
        and torch.version.hip is None
        and x.dtype == weight.dtype == torch.bfloat16
        and x.shape[1] % 8 == 0  # rows begin on 16 bytes
        and weight.shape[1] % 8 == 0
        and torch.cuda.get_device_capability(x.device) in ((9, 0), (10, 0))
    )


MAX_FUSED_ROWS = 16
"""Rows per expert, on average, up to which dense experts are multiplied by our kernel rather than
torch's: it gathers and scatters on the way, and the weights' way from memory takes the time."""


def can_fuse(hidden: Tensor, chosen: Tensor, weight: Tensor | TiledWeight) -> bool:
    """Whether :func:`expert_linear` is to be used for the experts' weights of one projection."""
    if isinstance(weight, TiledWeight):
        return True
    if not hidden.is_cuda or ops.triton_kernels() is None:
        return False
    few = chosen.numel() <= MAX_FUSED_ROWS * len(weight)
    return few or not _torch_has_kernel(hidden, weight)


def expert_linear(
    x: Tensor, weight: Tensor | TiledWeight, bias: Tensor | None, rows: ExpertRows
) -> Tensor:
    """Products of sorted rows with their experts' weights [E, out, in], by Triton: [P, out]."""
    if isinstance(weight, TiledWeight):
        from tgi_cli.quantization.triton_product import triton_product

        return triton_product(x, weight, bias, rows)
    from tgi_cli.layers.triton_grouped import triton_grouped_linear

    return triton_grouped_linear(x, weight, bias, rows)
