"""Reports how a checkpoint is quantized, and which kernels would compute with it here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tgi_cli.config.resolve import default_cpu_dtype
from tgi_cli.errors import TgiError
from tgi_cli.kernels.facts import describe_device
from tgi_cli.models.checkpoint import merge_quantized, read_headers, read_tensor
from tgi_cli.models.config import ModelConfig, read_config
from tgi_cli.models.registry import checkpoint_format, model_facts, quantization_name
from tgi_cli.models.stored_tensor import QUANTIZED, StoredTensor
from tgi_cli.quantization.block_weight import CodedWeight
from tgi_cli.quantization.matmul import make_matmul


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Weights that are quantized alike.

    Attributes:
        how: ``4 bits, groups of 128``, or the dtype of plain weights.
        modules: their names.
        parameters: number of their parameters.
        num_bytes: bytes on disk, scales included.
        kernel: the kernel that computes with them on this device. For quantized weights without
            one, the reason why they are dequantized; None for plain weights.
    """

    how: str
    modules: tuple[str, ...]
    parameters: int
    num_bytes: int
    kernel: str | None


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """What :func:`describe` finds.

    Attributes:
        architecture: as config.json names it.
        method: a value of ``--quantize``; None if nothing is quantized.
        quantized: weights by the way they are quantized, the most frequent first.
        plain: other tensors by dtype, embeddings and norms among them.
        device: the device for which kernels were chosen.
    """

    architecture: str
    method: str | None
    quantized: tuple[WeightGroup, ...]
    plain: tuple[WeightGroup, ...]
    device: str

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return sum(group.num_bytes for group in (*self.quantized, *self.plain))

    @property
    def exceptions(self) -> dict[str, str]:
        """The quantization of the modules that differ from most, by module."""
        return {name: group.how for group in self.quantized[1:] for name in group.modules}

    def lines(self) -> Iterator[str]:
        """The report as text."""
        yield f"{self.architecture}, {self.method or 'not quantized'}, {_mib(self.num_bytes)}"
        for group in (*self.quantized, *self.plain):
            per = 8 * group.num_bytes / max(1, group.parameters)
            what = (
                f"{len(group.modules)} tensors"
                if group.kernel is None
                else (f"{len(group.modules)} weights")
            )
            yield f"  {what} in {group.how}: {_mib(group.num_bytes)}, {per:.2f} bits per number"
            if group.kernel is not None:
                yield f"    on {self.device}: {group.kernel}"
        for name, how in self.exceptions.items():
            yield f"  {name}: {how}"


def describe(folder: Path, device: str | None = None) -> CheckpointReport:
    """Report on the checkpoint in ``folder``; reads a few of its weights.

    ``device``: ``cpu`` or ``cuda``. Default: CUDA if it is available.

    Raises:
        UnsupportedModelError: its quantization cannot be read.
        CheckpointError: its files cannot be read, or contradict each other.
        ModelError: there is no checkpoint.
    """
    config, facts = read_config(folder), describe_device(device)
    layout = checkpoint_format(config)
    stored = read_headers(folder)
    if layout is not None:
        stored = merge_quantized(stored, layout)
    dtype = torch.bfloat16
    if not facts.native_bfloat16:
        dtype = getattr(torch, default_cpu_dtype(facts, _has_torch_products(config)))
    kernel_of = partial(_kernel, dtype=dtype, device=torch.device(facts.kind))
    ways: dict[str, list[StoredTensor]] = {}
    for tensor in stored.values():
        ways.setdefault(tensor.about if tensor.dtype == QUANTIZED else tensor.dtype, []).append(
            tensor
        )
    found = sorted(
        (_group_of(how, tensors, kernel_of) for how, tensors in ways.items()),
        key=lambda group: -len(group.modules),
    )
    return CheckpointReport(
        config.architecture,
        quantization_name(config),
        tuple(group for group in found if group.kernel is not None),
        tuple(group for group in found if group.kernel is None),
        f"{facts.kind} in {str(dtype).removeprefix('torch.')}",
    )


def _has_torch_products(config: ModelConfig) -> bool:
    """See :class:`tgi_cli.config.ModelFacts`; False for a model that cannot be served."""
    try:
        return model_facts(config).torch_products
    except TgiError:
        return False


def _group_of(
    how: str, tensors: list[StoredTensor], kernel_of: Callable[[StoredTensor], str]
) -> WeightGroup:
    kernels: dict[str, None] = {}
    by_shape = {tensor.shape: tensor for tensor in tensors if tensor.dtype == QUANTIZED}
    for tensor in by_shape.values():
        kernels[kernel_of(tensor)] = None
    return WeightGroup(
        how,
        tuple(tensor.name.removesuffix(".weight") for tensor in tensors),
        sum(torch.Size(tensor.shape).numel() for tensor in tensors),
        sum(_size(part) for tensor in tensors for part in tensor.parts or (tensor,)),
        "; ".join(kernels) or None,
    )


def _kernel(tensor: StoredTensor, dtype: torch.dtype, device: torch.device) -> str:
    """The kernel that computes with a weight by default, found by creating it."""
    assert tensor.read is not None
    weight = tensor.read(*map(read_tensor, tensor.parts))
    assert isinstance(weight, CodedWeight)
    product = make_matmul(weight, dtype, device, input_bits=8)
    if isinstance(product, str):
        return f"dense, as {product}"
    return product.kernel


def _size(stored: StoredTensor) -> int:
    bits = re.search(r"\d+", stored.dtype)  # BF16, I32, F8_E4M3; BOOL has a byte
    return torch.Size(stored.shape).numel() * (int(bits[0]) if bits else 8) // 8


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
