"""Gives a file's tensors the names and the order of outputs that model families expect.

The names are those of the architecture's checkpoints in safetensors. Blocks lie within rows, so
that rows can be taken apart and reordered without touching their codes.
https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tgi_cli.gguf.keys import ArchitectureKeys
from tgi_cli.gguf.name_parts import FileModule, Rows
from tgi_cli.gguf.name_tables import name_table
from tgi_cli.gguf.reader import GGUFFile, GGUFTensor

_NUMBER = "(0|[1-9][0-9]{0,5})"
_BLOCK = re.compile(rf"blk\.{_NUMBER}\.([a-z0-9_.]+?)(?:\.(weight|bias))?")
_OLD_EXPERT = re.compile(rf"(ffn_(?:gate|up|down))\.{_NUMBER}")
"""Experts of older files, a tensor each."""

_MOST_VIEWS = 1 << 18
"""Limit of the tensors that a model has, each expert's counted. The largest mixtures of experts
have a third of it."""

_MOST_EXPERTS = 1 << 10
"""Limit of experts in one tensor, as in llama.cpp."""

_UNUSED = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.[0-9]+\.attn_rot_embd(\.weight)?"
)
"""Tensors that config.json was made of, or that are computed."""


@dataclass(frozen=True, slots=True)
class WeightView:
    """A tensor that a model family expects, as rows of one in a file.

    Attributes:
        name: such as ``model.layers.0.self_attn.q_proj.weight``.
        tensor: that has it.
        shape: as stored, [out, in] of a weight.
        start: offset of its bytes in the file.
        size: its bytes.
        rows: brings outputs into the order that the family expects. Default: they are.
        columns: the order of equal stretches of inputs that the family expects, likewise.
        numbers: what is done to numbers (not blocks) in float32.
        transposed: whether the family expects numbers (not blocks) as [in, out].
        final_shape: that the family expects of numbers, if it differs.
        beside: a tensor of which, with this one, ``join`` makes the weight in float32.
    """

    name: str
    tensor: GGUFTensor
    shape: tuple[int, ...]
    start: int
    size: int
    rows: Rows | None = None
    columns: tuple[int, ...] = ()
    numbers: Callable[[Any], Any] | None = None
    transposed: bool = False
    final_shape: tuple[int, ...] | None = None
    beside: GGUFTensor | None = None
    join: Callable[[Any, Any], Any] | None = None


def weight_views(file: GGUFFile) -> Iterator[WeightView]:
    """The tensors of a file as the families expect them. Unknown ones keep their names.

    Raises:
        ModelError: keys or shapes contradict each other.
        UnsupportedModelError: layers that differ in size.
    """
    keys = ArchitectureKeys(file)
    for count, view in enumerate(_all_views(keys), 1):
        if count > _MOST_VIEWS:
            raise keys.invalid(f"its tensors have more than {_MOST_VIEWS} parts")
        yield view


def _all_views(keys: ArchitectureKeys) -> Iterator[WeightView]:
    names = name_table(keys)
    joined = {module.joined[0] for module in names.block.values() if module.joined}
    drafts = range(keys.num_layers, keys.whole("block_count"))
    for tensor in keys.file.tensors.values():
        if _UNUSED.fullmatch(tensor.name):
            continue
        match = _BLOCK.fullmatch(tensor.name)
        if match is None:
            path, _, suffix = tensor.name.rpartition(".")
            module = names.top.get(path)
            prefix = ""
        else:
            layer, path, suffix = int(match[1]), match[2], match[3] or ""
            if layer in drafts:
                continue
            if path in joined:
                continue  # with another
            # Layers beyond the stated number keep their names, and are found to be too many.
            module = names.block.get(path) if layer < drafts.start else None
            prefix = f"{names.layers}.{layer}."
            old = _OLD_EXPERT.fullmatch(path)
            if module is None and old is not None and f"{old[1]}_exps" in names.block:
                module = names.block[f"{old[1]}_exps"]
                module = replace(module, name=module.name.replace("{e}", old[2]))
        if module is None:
            yield WeightView(tensor.name, tensor, tensor.shape, tensor.start, tensor.size)
        elif module.joined is not None:
            yield _joined_view(keys, tensor, module, prefix, suffix)
        else:
            yield from _views(keys, tensor, module, prefix, suffix)


def _views(
    keys: ArchitectureKeys, tensor: GGUFTensor, module: FileModule, prefix: str, suffix: str
) -> Iterator[WeightView]:
    """The tensor itself, each expert's part of it, or the modules that it consists of."""
    if not tensor.shape:
        raise keys.invalid(f"{tensor.name} has no dimensions")
    count = tensor.shape[0] if "{e}" in _all_names(module) else 1
    if count > _MOST_EXPERTS:
        raise keys.invalid(f"{tensor.name} has {count} experts")
    shape = tensor.shape[1:] if "{e}" in _all_names(module) else tensor.shape
    if not shape:
        raise keys.invalid(f"{tensor.name} has the shape {list(tensor.shape)}")
    if len(shape) == 1 and tensor.type.elements > 1:
        raise keys.invalid(f"{tensor.name} is a vector of type {tensor.type.name}")
    outputs = sum(size for _, size in module.parts) if module.parts else shape[0]
    if outputs != shape[0]:
        raise keys.invalid(f"{tensor.name} has {shape[0]} instead of {outputs} outputs")
    row_bytes = tensor.size // math.prod(tensor.shape[: len(tensor.shape) - len(shape) + 1])
    for expert in range(count):
        first = expert * shape[0]
        for part, size in module.parts or ((module, shape[0]),):
            name = prefix + part.name.replace("{e}", str(expert))
            own = (size, *shape[1:])
            final: tuple[int, ...] | None = None
            sizes = [each for each in own if each != 1]
            if part.middle and len(sizes) == 2:
                final = (sizes[0], 1, sizes[1])
            final = (1, size) if part.single and len(shape) == 1 else final
            final = (math.prod(own),) if part.flat else final
            yield WeightView(
                name if part.bare or not suffix else f"{name}.{suffix}",
                tensor,
                own,
                tensor.start + first * row_bytes,
                size * row_bytes,
                part.rows,
                part.columns,
                None if suffix == "bias" else part.numbers,
                part.transposed,
                final,
            )
            first += size


def _joined_view(
    keys: ArchitectureKeys, tensor: GGUFTensor, module: FileModule, prefix: str, suffix: str
) -> WeightView:
    """A weight of two tensors [heads, ...], whose heads have all outputs of one, then the other's.

    The inputs are the second dimension of this one and the last of the other.
    """
    assert module.joined is not None
    path, join = module.joined
    other = tensor.name.replace(tensor.name.split(".")[2], path)
    shape, beside = tensor.shape, keys.shape(other)
    if len(shape) != 3 or len(beside) != 3 or (shape[0], shape[1]) != (beside[0], beside[2]):
        raise keys.invalid(f"{tensor.name} has the shape {list(shape)}, {other} {list(beside)}")
    return WeightView(
        f"{prefix}{module.name}.{suffix}",
        tensor,
        shape,
        tensor.start,
        tensor.size,
        final_shape=(shape[0] * (shape[2] + beside[1]), shape[1]),
        beside=keys.file.tensors[other],
        join=join,
    )


def _all_names(module: FileModule) -> str:
    return " ".join([module.name, *(part.name for part, _ in module.parts)])
