"""Layouts of quantized weights: tensors of each format, and the config of a checkpoint.

The formats are those of https://github.com/ModelCloud/GPTQModel,
https://github.com/casper-hansen/AutoAWQ and https://github.com/vllm-project/compressed-tensors;
:mod:`tgi_cli.quantization.detect` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tgi_cli.quantization import bits
from tgi_cli.quantization.algorithms.recipe import QuantizationResult, Recipe
from tgi_cli.version import __version__

_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Order of eight outputs in a word, lowest bits first."""


def pack(result: QuantizationResult, recipe: Recipe) -> dict[str, Tensor]:
    """Pack a module's tensors, on the CPU, by suffixes such as ``qweight``.

    ``MODULE.SUFFIX`` replaces ``MODULE.weight``; its ``bias`` is unchanged.
    """
    codes, scales, groups = result.codes.cpu(), result.scales.cpu(), result.groups.cpu()
    if result.zeros is None:
        return _bytes(codes, scales, recipe)
    zeros = result.zeros.cpu()
    if recipe.format == "compressed-tensors":
        return _pack_quantized(codes, scales, zeros, recipe)
    scales = scales.half()
    zeros = zeros.to(torch.uint8)
    if recipe.format == "awq":
        return {
            "qweight": _awq_words(codes.T),
            "qzeros": _awq_words(zeros),
            "scales": scales.contiguous(),
        }
    if recipe.format == "gptq":  # zeros minus 1
        assert bool((zeros > 0).all()), "a zero of 0 does not fit this format"
        zeros = zeros - 1
    return {
        "qweight": bits.pack(codes, recipe.bits).T.contiguous(),
        "qzeros": bits.pack(zeros, recipe.bits),
        "scales": scales.contiguous(),
        "g_idx": groups,
    }


def _awq_words(numbers: Tensor) -> Tensor:
    """[n, N] to int32 [n, N / 8]."""
    eights = numbers.reshape(len(numbers), -1, 8)
    return bits.pack(eights[:, :, _AWQ_ORDER].flatten(1), 4)


def _bytes(codes: Tensor, scales: Tensor, recipe: Recipe) -> dict[str, Tensor]:
    if recipe.method == "int8":
        codes = codes.bitwise_xor(0x80).view(torch.int8)  # minus 128
    scales = scales.T.to(recipe.scale_dtype).contiguous()
    return {"weight": codes, "weight_scale": scales[:1, 0] if recipe.group_size == 0 else scales}


def _pack_quantized(
    codes: Tensor, scales: Tensor, zeros: Tensor, recipe: Recipe
) -> dict[str, Tensor]:
    tensors = {
        "weight_packed": _padded_words(codes, recipe.bits),
        "weight_scale": scales.T.to(recipe.scale_dtype).contiguous(),
        "weight_shape": torch.tensor(codes.shape),
    }
    if not recipe.sym:
        packed = _padded_words(zeros.to(torch.uint8), recipe.bits)
        tensors["weight_zero_point"] = packed.T.contiguous()
    return tensors


def _padded_words(numbers: Tensor, width: int) -> Tensor:
    return bits.pack(pad(numbers, (0, -numbers.shape[1] % (32 // width))), width)


def quantization_config(
    recipe: Recipe, ignored: Sequence[str], modules: Collection[str] = ()
) -> dict[str, Any]:
    """config.json's ``quantization_config``, as vLLM, transformers and gptqmodel read it.

    Args:
        recipe: recipe of all quantized modules.
        ignored: full names of linear modules that are not quantized, such as ``lm_head`` or
            ``model.layers.0.mlp.gate``.
        modules: full names of the quantized modules.
    """
    if recipe.format == "compressed-tensors":
        return _compressed_config(recipe, ignored)
    if recipe.format == "awq":
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": recipe.bits,
            "group_size": recipe.group_size,
            "zero_point": True,  # the layout has zeros, even for a symmetric grid
            "modules_to_not_convert": list(ignored) or None,
        }
    plain = [name for name in ignored if name != "lm_head"]
    config = {
        "quant_method": "gptq",
        "checkpoint_format": recipe.format,
        "bits": recipe.bits,
        "group_size": recipe.group_size,
        "sym": recipe.sym,
        # With static groups inputs are stored in the original order.
        "desc_act": recipe.desc_act and not recipe.static_groups,
        "static_groups": recipe.static_groups,
        "true_sequential": True,
        "damp_percent": recipe.percdamp,
        "lm_head": False,
        "pack_dtype": "int32",
        # A rule for each module without a quantized weight, as a regular expression.
        "dynamic": {f"-:^{re.escape(name)}$": {} for name in plain} or None,
        "meta": {
            "quantizer": [f"tgi:{__version__}"],
            "method": recipe.method,
            "act_group_aware": recipe.method == "gptq" and recipe.group_aware,
            "mse": recipe.mse,
        },
    }
    if plain and modules:  # transformers reads these instead of rules
        config["modules_in_block_to_quantize"] = [_short_names(modules, plain)]
    return config


def _short_names(modules: Collection[str], plain: Sequence[str]) -> list[str]:
    """Parts of names that identify the quantized modules.

    The part after a block's number (``mlp.up_proj``) if it matches no plain module, else the full
    name.
    """
    names = dict.fromkeys(re.sub(r"^.*?\.\d+\.", "", name) for name in modules)
    clear = [name for name in names if not any(name in other for other in plain)]
    return clear + [name for name in modules if not name.endswith(tuple(clear))]


def _compressed_config(recipe: Recipe, ignored: Sequence[str]) -> dict[str, Any]:
    activations = None
    if recipe.method in ("fp8", "int8"):
        kind = "float" if recipe.method == "fp8" else "int"
        layout = f"{kind}-quantized"
        weights = _scheme(kind, 8, "tensor" if recipe.group_size == 0 else "channel")
        # Kernels of other engines for these weights quantize their inputs, too.
        activations = _scheme(kind, 8, "token", dynamic=True)
    else:
        layout = "pack-quantized"
        strategy = "channel" if recipe.group_size == -1 else "group"
        weights = _scheme("int", recipe.bits, strategy)
        weights["symmetric"] = recipe.sym
        weights["group_size"] = recipe.group_size if recipe.group_size > 0 else None
        weights["actorder"] = "weight" if recipe.desc_act else None
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
        "format": layout,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _scheme(kind: str, width: int, strategy: str, *, dynamic: bool = False) -> dict[str, Any]:
    """compressed-tensors' ``QuantizationArgs``."""
    return {
        "type": kind,
        "num_bits": width,
        "symmetric": True,
        "strategy": strategy,
        "group_size": None,
        "block_structure": None,
        "dynamic": dynamic,
        "actorder": None,
        "observer": None if dynamic else "minmax",
        "observer_kwargs": {},
    }


def quantize_config(
    recipe: Recipe, ignored: Sequence[str], modules: Collection[str] = ()
) -> dict[str, dict[str, Any]]:
    """The format's own files beside config.json, by name; arguments of quantization_config.

    gptq: ``quantize_config.json``; awq: ``quant_config.json``; compressed-tensors: none.
    """
    if recipe.format == "compressed-tensors":
        return {}
    config = quantization_config(recipe, ignored, modules)
    if recipe.format != "awq":
        return {"quantize_config.json": config}
    own = {
        "zero_point": True,
        "q_group_size": recipe.group_size,
        "w_bit": recipe.bits,
        "version": "GEMM",
        "modules_to_not_convert": config["modules_to_not_convert"],
    }
    return {"quant_config.json": own}
