"""Quantized checkpoints in the layouts of the libraries that own them, written without our code.

Codes are rounded to nearest, which is all that a random model deserves. Each writer also returns
the weight that its tensors stand for, so that a plain twin can be served beside it.

``python -m tests.tools.quantized CHECKPOINT OUT --bits 4 --group-size 128`` writes GPTQ.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

LINEAR = (
    r".*\.(layers|h)\.\d+\..*"
    r"(proj|in_proj_qkvz?|in_proj_z|w[123]|c_attn|c_proj|c_fc|fc[12]|dense|_with_mqa)"
)
"""Modules that are quantized unless something else is said."""

Written = tuple[dict[str, Tensor], Tensor]
"""A module's tensors by suffix, and the weight that they stand for (float32)."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Layout:
    """How a format keeps a module, and what config.json then says."""

    config: dict[str, Any]
    write: Callable[[str, Tensor], Written]
    extra: dict[str, Any] = field(default_factory=dict)
    """Other files: name to JSON."""


def write_quantized(
    source: Path,
    out: Path,
    layout: Layout,
    *,
    modules: str = LINEAR,
    twin: Path | None = None,
) -> Path:
    """Write ``source`` quantized into ``out``; into ``twin`` what it stands for, in float32.

    Args:
        source: a plain checkpoint.
        out: a folder, which may exist.
        layout: see :class:`Layout`.
        modules: a regular expression for the names of those that are quantized.
        twin: a folder, too.
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in _tensors(source):
        module = name.removesuffix(".weight")
        if module == name or tensor.ndim != 2 or not re.fullmatch(modules, module):
            tensors[name] = tensor
            plain[name] = tensor.float()
            continue
        written, plain[name] = layout.write(module, tensor.float())
        tensors |= {
            f"{module}.{suffix}": each.contiguous().clone() for suffix, each in written.items()
        }
    config = json.loads((source / "config.json").read_text())
    _write(source, out, tensors, config | {"quantization_config": layout.config})
    for name, value in layout.extra.items():
        (out / name).write_text(json.dumps(value))
    if twin is not None:
        _write(source, twin, plain, config | {"dtype": "float32"})
    return out


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                yield name, tensors.get_tensor(name)


def _write(source: Path, out: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name != "model.safetensors.index.json":
            shutil.copy(file, out / file.name)
    (out / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def packed(codes: Array, bits: int) -> Array:
    """Codes [n, k] as int32 words [n, k * bits / 32]: a stream of bits, the lowest first."""
    stream = (codes[..., None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8)) & 1
    stream = stream.reshape(codes.shape[0], -1)
    return np.packbits(stream, axis=1, bitorder="little").view("<i4")


def group_codes(
    weight: Array, bits: int, groups: Array, sym: bool
) -> tuple[Array, Array, Array, Array]:
    """Round a weight [n, k] to codes; the group of each input is given.

    Returns codes [n, k], scales float16 [n, G], zeros [n, G], and the weight that these are.
    """
    count, top = int(groups.max()) + 1, 2**bits - 1
    scales = np.empty((len(weight), count), np.float16)
    zeros = np.empty((len(weight), count), np.int64)
    for group in range(count):
        part = weight[:, groups == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if sym:
            high = np.maximum(-low, high)
            low = -high
        scales[:, group] = np.maximum((high - low) / top, 1e-6)
        exact = scales[:, group].astype(np.float32)
        zeros[:, group] = 2 ** (bits - 1) if sym else np.clip(np.round(-low / exact), 0, top)
    scale, zero = scales.astype(np.float32)[:, groups], zeros[:, groups]
    codes = np.clip(np.round(weight / scale) + zero, 0, top).astype(np.int64)
    return codes, scales, zeros, (codes - zero).astype(np.float32) * scale


def gptq(
    bits: int = 4,
    group_size: int = 128,
    *,
    sym: bool = True,
    desc_act: bool = False,
    v2: bool = False,
    indexed: bool = True,
    seed: int = 0,
) -> Layout:
    """gptqmodel's; with ``desc_act`` inputs are in groups as chance has it."""

    def write(module: str, tensor: Tensor) -> Written:
        weight = tensor.numpy()
        inputs = weight.shape[1]
        size = group_size if group_size > 0 else inputs
        groups = np.arange(inputs) // size
        if desc_act:
            # q, k and v see the same inputs, and so have the same order.
            groups = np.random.default_rng(seed + inputs).permutation(groups)
        codes, scales, zeros, stands_for = group_codes(weight, bits, groups, sym)
        if v2:
            kept = packed(zeros.T, bits)
        elif bits == 3:
            kept = packed((zeros.T - 1) % 8, bits)
        else:  # 1 is taken off every field of a word by one subtraction
            ones = sum(1 << at for at in range(0, 32, bits))
            kept = (packed(zeros.T, bits).view(np.uint32) - np.uint32(ones)).view(np.int32)
        tensors = {
            "qweight": packed(codes, bits).T,
            "qzeros": kept,
            "scales": scales.T,
        }
        if indexed:
            tensors["g_idx"] = groups.astype(np.int32)
        return _torch(tensors), torch.from_numpy(stands_for)

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": desc_act,
        "sym": sym,
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }
    return Layout(config, write)


def awq(group_size: int = 128) -> Layout:
    """AutoAWQ's gemm."""
    nibbles = [0, 2, 4, 6, 1, 3, 5, 7]  # the columns of eight that a word has, lowest bits first

    def words(columns: Array) -> Array:
        eights = columns.reshape(len(columns), -1, 8)[:, :, nibbles]
        return packed(eights.reshape(len(columns), -1), 4)

    def write(module: str, tensor: Tensor) -> Written:
        groups = np.arange(tensor.shape[1]) // group_size
        codes, scales, zeros, stands_for = group_codes(tensor.numpy(), 4, groups, sym=False)
        tensors = {"qweight": words(codes.T), "qzeros": words(zeros.T), "scales": scales.T}
        return _torch(tensors), torch.from_numpy(stands_for)

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
    }
    return Layout(config, write)


def _compressed(layout: str, weights: dict[str, Any], ignore: list[str]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": layout}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *ignore],
        "kv_cache_scheme": None,
    }


def pack_quantized(
    bits: int = 4,
    group_size: int = 128,
    *,
    sym: bool = True,
    actorder: bool = False,
    whole: bool = False,
) -> Layout:
    """compressed-tensors: integers in words, in older files (``whole``) as many as fit whole.

    ``group_size`` 0: one scale per row.
    """

    def words(codes: Array) -> Array:
        if not whole:
            padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 32)))
            return packed(padded, bits)[:, : -(-codes.shape[1] * bits // 32)]
        count = 32 // bits
        padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % count)))
        fields = padded.reshape(len(codes), -1, count).astype(np.uint64)
        shifted = fields << (np.arange(count, dtype=np.uint64) * bits)
        words: Array = shifted.sum(-1).astype(np.uint32).view(np.int32)
        return words

    def write(module: str, tensor: Tensor) -> Written:
        weight = tensor.numpy()
        inputs = weight.shape[1]
        groups = np.arange(inputs) // (group_size or inputs)
        if actorder:
            groups = np.random.default_rng(inputs).permutation(groups)
        codes, scales, zeros, stands_for = group_codes(weight, bits, groups, sym)
        tensors = {
            "weight_packed": words(codes),
            "weight_scale": scales.astype(np.float32),
            "weight_shape": np.array(weight.shape),
        }
        if not sym:
            tensors["weight_zero_point"] = words(zeros.T).T
        if actorder:
            tensors["weight_g_idx"] = groups.astype(np.int32)
        return _torch(tensors), torch.from_numpy(stands_for)

    scheme = {
        "num_bits": bits,
        "type": "int",
        "symmetric": sym,
        "strategy": "group" if group_size else "channel",
        "group_size": group_size or None,
        "actorder": "group" if actorder else None,
    }
    return Layout(_compressed("pack-quantized", scheme, []), write)


def int_quantized() -> Layout:
    """compressed-tensors: a byte per element, a scale per row."""

    def write(module: str, tensor: Tensor) -> Written:
        codes, scales = _int8(tensor)
        tensors = {"weight": codes, "weight_scale": scales[:, None]}
        return tensors, codes.float() * scales[:, None]

    scheme = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    return Layout(_compressed("int-quantized", scheme, []), write)


def float_quantized(strategy: str = "channel") -> Layout:
    """compressed-tensors: e4m3, a scale per row (``channel``), tensor or block."""
    plain = fp8(strategy)

    def write(module: str, tensor: Tensor) -> Written:
        tensors, stands_for = plain.write(module, tensor)
        if strategy == "block":
            tensors["weight_scale"] = tensors.pop("weight_scale_inv")
        return tensors | {"input_scale": torch.ones(1)}, stands_for

    scheme: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    scheme |= {"strategy": strategy, "block_structure": [128, 128] if strategy == "block" else None}
    return Layout(_compressed("float-quantized", scheme, []), write)


def nvfp4(library: str) -> Layout:
    """NVFP4 as ``modelopt`` or ``compressed-tensors`` keeps it: e2m1, blocks of 16."""
    steps = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

    def write(module: str, tensor: Tensor) -> Written:
        outputs, inputs = tensor.shape
        blocks = tensor.view(outputs, inputs // 16, 16)
        whole = tensor.abs().max() / (6 * 448)
        kept = whole if library == "modelopt" else 1 / whole
        scales = (blocks.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
        wide = scales.float()
        every = wide * kept if library == "modelopt" else wide / kept
        size = (blocks.abs() / every.clamp(min=1e-30)[..., None]).clamp(max=6)
        codes = (size[..., None] - steps).abs().argmin(-1)
        values = steps[codes] * blocks.sign() * every[..., None]
        codes = (codes + 8 * (blocks < 0)).view(outputs, inputs).to(torch.uint8)
        packed = codes[:, 0::2] | codes[:, 1::2] << 4
        names = {
            "modelopt": ("weight", "weight_scale", "weight_scale_2"),
            "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
        }[library]
        tensors = dict(zip(names, (packed, scales, kept.reshape(1)), strict=True))
        return tensors | {"input_scale": torch.ones(1)}, values.view(outputs, inputs)

    if library == "modelopt":
        return Layout({"quant_method": "modelopt", "quant_algo": "NVFP4"}, write)
    scheme: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True}
    scheme |= {"strategy": "tensor_group", "group_size": 16}
    return Layout(_compressed("nvfp4-pack-quantized", scheme, []), write)


def fp8(strategy: str = "channel", *, inverse: bool = False) -> Layout:
    """e4m3 with a scale per row (``channel``), ``tensor`` or ``block`` of 128 x 128.

    ``inverse``: gptqmodel's, whose scales are to be divided by.
    """

    def write(module: str, tensor: Tensor) -> Written:
        outputs, inputs = tensor.shape
        rows = {"channel": 1, "tensor": outputs, "block": 128}[strategy]
        columns = 128 if strategy == "block" else inputs
        blocks = torch.nn.functional.pad(tensor, (0, -inputs % columns, 0, -outputs % rows))
        blocks = blocks.view(blocks.shape[0] // rows, rows, blocks.shape[1] // columns, columns)
        scales = blocks.abs().amax((1, 3)) / 448
        every = scales.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)
        every = every[:, :inputs]
        codes = (tensor / every).to(torch.float8_e4m3fn)
        name = "weight_scale_inv" if strategy == "block" or inverse else "weight_scale"
        kept = scales[0, 0] if strategy == "tensor" else scales
        if inverse:
            kept = 1 / kept.flatten()
            every = 1 / (1 / every)
        return {"weight": codes, name: kept}, codes.float() * every

    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if strategy == "block":
        config["weight_block_size"] = [128, 128]
    if inverse:
        config |= {"weight_scale_semantics": "inverse", "weight_scale_method": "row"}
    return Layout(config, write)


def bitsandbytes_8bit() -> Layout:
    """LLM.int8."""

    def write(module: str, tensor: Tensor) -> Written:
        codes, scales = _int8(tensor)
        state = {"SCB": scales * 127, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return {"weight": codes, **state}, codes.float() * (state["SCB"] / 127)[:, None]

    return Layout({"quant_method": "bitsandbytes", "load_in_8bit": True}, write)


def bitsandbytes_4bit(kind: str = "nf4", *, nested: bool = False) -> Layout:
    """nf4 or fp4, in blocks of 64 elements row after row."""
    if kind == "nf4":  # quantiles of the normal distribution, 8 above 0 and 7 below
        quantile = NormalDist().inv_cdf
        above = [quantile(p) for p in np.linspace(0.9677083, 0.5, 9)[:-1]]
        below = [-quantile(p) for p in np.linspace(0.9677083, 0.5, 8)[:-1]]
        values = np.sort([*above, *below, 0])
        table = torch.tensor(values / values.max(), dtype=torch.float32)
    else:  # sign, exponent of two bits, mantissa of one
        positive = [0, 0.0625, 8, 12, 4, 6, 2, 3]
        table = torch.tensor([*positive, *(-value for value in positive)]) / 12

    def write(module: str, tensor: Tensor) -> Written:
        blocks = torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % 64)).view(-1, 64)
        scales = blocks.abs().amax(1)
        state = {
            "quant_type": kind,
            "blocksize": 64,
            "dtype": "float32",
            "shape": list(tensor.shape),
        }
        tensors = {"weight.absmax": scales, "weight.quant_map": table}
        if nested:
            offset = scales.mean()
            steps = torch.linspace(-1, 1, 256) ** 3
            outer = torch.nn.functional.pad(scales - offset, (0, -len(scales) % 256)).view(-1, 256)
            largest = outer.abs().amax(1)
            nearest = (outer / largest[:, None]).flatten()[: len(scales), None] - steps
            absmax = nearest.abs().argmin(1)
            scales = steps[absmax] * largest.repeat_interleave(256)[: len(scales)] + offset
            state |= {"nested_blocksize": 256, "nested_offset": float(offset)}
            state |= {"nested_dtype": "float32"}
            tensors["weight.absmax"] = absmax.to(torch.uint8)
            tensors["weight.nested_absmax"] = largest
            tensors["weight.nested_quant_map"] = steps
        codes = (blocks[..., None] / scales[:, None, None] - table).abs().argmin(-1)
        stands_for = (table[codes] * scales[:, None]).flatten()[: tensor.numel()]
        flat = codes.flatten()[: tensor.numel()].to(torch.uint8)
        tensors["weight"] = (flat[::2] << 4 | flat[1::2])[:, None]
        text = json.dumps(state).encode()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text)).to(
            torch.uint8
        )
        return tensors, stands_for.view(tensor.shape)

    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
    }
    return Layout(config, write)


def _int8(tensor: Tensor) -> tuple[Tensor, Tensor]:
    scales = tensor.abs().amax(1) / 127
    return (tensor / scales[:, None]).round().to(torch.int8), scales


def _torch(arrays: dict[str, Array]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(each)) for name, each in arrays.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bits", type=int, choices=(2, 3, 4, 8), default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--asym", action="store_true")
    parser.add_argument("--desc-act", action="store_true")
    arguments = parser.parse_args()
    layout = gptq(
        arguments.bits,
        arguments.group_size,
        sym=not arguments.asym,
        desc_act=arguments.desc_act,
    )
    print(write_quantized(arguments.checkpoint, arguments.out, layout))


if __name__ == "__main__":
    main()
