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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

LINEAR = r".*\.(layers|h)\.\d+\..*(proj|w1|w2|w3|c_attn|c_proj|c_fc|fc1|fc2|dense)"
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
        tensors |= {f"{module}.{suffix}": each.contiguous() for suffix, each in written.items()}
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
