"""compressed-tensors, as llm-compressor writes it.

https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.patterns import Patterns
from tgi_cli.quantization import fp8, nvfp4
from tgi_cli.quantization.bits import unpack
from tgi_cli.quantization.formats import CheckpointFormat, MergedWeight, ModuleTensors, ReadTensor
from tgi_cli.quantization.quantized_weight import QuantizedWeight, can_expand_scales, expand_scales

_WIDTHS = (2, 3, 4, 8)


class CompressedTensors(CheckpointFormat):
    """Weights by schemes (``config_groups``): integers, packed or in bytes, e4m3, or NVFP4.

    Activations are rounded to e4m3 if a scheme of e4m3 weights requests it and the device
    multiplies in it. Whether products with integers round them is a setting
    (``--quantize-activations``), whatever the scheme names.
    """

    name = "compressed-tensors"
    code_suffixes = ("weight_packed", "weight")
    required_suffixes = ("weight_scale",)
    optional_suffixes = (
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
        "weight_global_scale",
        "input_scale",
        "input_zero_point",
        "input_global_scale",
    )
    ignored = (r".*\.[qkv]_(scale|zero_point)",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._patterns = Patterns()
        self.schemes = [
            (
                list(map(str, group["targets"])),
                {**(group["weights"] or {}), "inputs": group.get("input_activations")},
            )
            for group in config["config_groups"].values()
        ]
        self.has_integers = any(
            bool(group["weights"]) and group["weights"].get("type", "int") == "int"
            for group in config["config_groups"].values()
        )
        if config.get("sparsity_config", {}).get("format", "dense") != "dense":
            raise UnsupportedModelError("compressed-tensors with sparse weights are not supported")

    def merge(self, module: str, tensors: ModuleTensors, peek: ReadTensor) -> MergedWeight:
        scheme = self._scheme(module)
        bits, block = int(scheme.get("num_bits", 8)), _block(scheme)
        if scheme.get("type") == "float" and bits == 8 and "weight" in tensors:
            rounds = scheme["inputs"] is not None
            return fp8.merge_tensors(self, module, tensors, block, rounds_inputs=rounds)
        if scheme.get("type") == "float" and bits == 4 and "weight_global_scale" in tensors:
            names = ("weight_packed", "weight_scale", "weight_global_scale")
            return nvfp4.merge_tensors(self, module, tensors, names, inverse=True)
        if scheme.get("type", "int") != "int" or bits not in _WIDTHS:
            raise UnsupportedModelError(
                f"{module} has weights of {bits} bits of type {scheme.get('type')!r}, "
                "which are not supported"
            )
        about = f"{bits} bits, " + (
            f"groups of {scheme['group_size']}" if scheme.get("group_size") else "one scale a row"
        )
        if "weight" in tensors:
            shape = tensors["weight"].shape
            self.check(module, tensors, tensors["weight"].dtype == "I8" and len(shape) == 2)
        else:
            self.check(module, tensors, "weight_shape" in tensors)
            shape = tuple(peek("weight_shape").tolist())
            words = tensors["weight_packed"].shape
            right = words in {(shape[0], width) for width in _widths(shape[1], bits)}
            self.check(module, tensors, right)
        whole = (shape[0], shape[1])
        scales = tensors["weight_scale"].shape
        right = "weight_g_idx" in tensors or can_expand_scales(scales, whole, block)
        self.check(module, tensors, right)
        main = "weight" if "weight" in tensors else "weight_packed"
        extra = [name for name in ("weight_zero_point", "weight_g_idx") if name in tensors]
        read = partial(_read, bits, whole, block, tuple(extra))
        return MergedWeight(whole, (main, "weight_scale", *extra), read, about)

    def _scheme(self, module: str) -> dict[str, Any]:
        """The scheme that targets the module by name, else the one for all linear layers."""
        for targets, scheme in self.schemes:
            if any(self._names(target, module) for target in targets):
                return scheme
        for targets, scheme in self.schemes:
            if "Linear" in targets:
                return scheme
        return self.schemes[0][1]

    def _names(self, target: str, module: str) -> bool:
        if target.startswith("re:"):
            return self._patterns.match(target.removeprefix("re:"), module)
        return target == module


def _block(scheme: Mapping[str, Any]) -> tuple[int, int] | None:
    """Size of a block, (outputs, inputs); a group is a block of one output."""
    if scheme.get("strategy") == "block":
        structure = scheme["block_structure"]
        sizes = structure.split("x") if isinstance(structure, str) else structure
        return int(sizes[0]), int(sizes[1])
    size = scheme.get("group_size")
    return (1, int(size)) if size and int(size) > 0 else None


def _read(
    bits: int,
    shape: tuple[int, int],
    block: tuple[int, int] | None,
    extra: tuple[str, ...],
    weight: Tensor,
    scales: Tensor,
    *others: Tensor,
) -> QuantizedWeight:
    more = dict(zip(extra, others, strict=True))
    offset = 2 ** (bits - 1)
    if weight.dtype == torch.int8:
        codes = (weight.int() + offset).to(torch.uint8)
    else:
        codes = _unpack(weight, bits, shape[1])
    g_idx = more.get("weight_g_idx")
    if g_idx is not None and bool((g_idx >= 0).all()):
        spread_scales, groups = scales.float(), g_idx.long()
    else:
        spread_scales, groups = expand_scales(scales, shape, block)
    zeros = more.get("weight_zero_point")
    if zeros is not None:
        if zeros.dtype == torch.int32:
            zeros = _unpack(zeros.T, bits, shape[0]).T.float()
        else:
            zeros = zeros.float() + offset
        zeros = expand_scales(zeros, shape, block)[0] if g_idx is None else zeros
    return QuantizedWeight(codes.contiguous(), spread_scales, zeros, groups, bits)


def _widths(count: int, bits: int) -> tuple[int, int]:
    """Words for ``count`` codes: as one stream of bits, or without codes that span words."""
    return -(-count * bits // 32), -(-count // (32 // bits))


def _unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack words int32 [n, w] to codes uint8 [n, count].

    In older checkpoints no code spans words.
    """
    if words.shape[1] == _widths(count, bits)[0]:
        return unpack(pad(words, (0, -words.shape[1] % bits)), bits)[:, :count]
    shifts = torch.arange(0, 32 - bits + 1, bits)
    codes = (words[..., None] >> shifts).bitwise_and_(2**bits - 1)
    return codes.to(torch.uint8).flatten(-2)[:, :count]
