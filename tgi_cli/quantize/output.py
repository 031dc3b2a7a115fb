"""A quantized checkpoint out of the blocks that are done and what stays as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from tgi_cli.models.checkpoint import StoredTensor
from tgi_cli.models.config import ModelConfig
from tgi_cli.quantization.algorithms.layout import quantization_config, quantize_config
from tgi_cli.quantization.algorithms.recipe import Recipe
from tgi_cli.quantize.tensors import Bytes, tensors_in, write_shards

SHARD_BYTES = 4 << 30
"""Of a file of weights."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
_REPLACED = (
    "config.json",
    "readme.md",
    "quantize_config.json",
    "quant_config.json",
)


def write_checkpoint(
    folder: Path,
    config: ModelConfig,
    stored: dict[str, StoredTensor],
    blocks: Sequence[Path],
    quantized: Collection[str],
    recipe: Recipe,
    ignored: Sequence[str],
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write all but the model card into ``folder``; returns the bytes of all tensors.

    Args:
        folder: a new one.
        config, stored: of the original; stacked experts may be there one by one.
        blocks: files with what the quantized blocks have in place of stored tensors.
        quantized: names of these.
        recipe: how.
        ignored: linear layers that stayed as they were.
    """
    folder.mkdir(parents=True)
    tensors = _merged(stored, blocks, quantized)
    total = write_shards(folder, tensors, shard_bytes)
    raw = {key: value for key, value in config.raw.items() if key != "compression_config"}
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    raw["quantization_config"] = quantization_config(recipe, ignored, modules)
    _write_json(folder / "config.json", raw)
    for name, content in quantize_config(recipe, ignored, modules).items():
        _write_json(folder / name, content)
    copy_rest(config.path, folder)
    return total


def copy_rest(source: Path, folder: Path) -> None:
    """Tokenizer, generation config, code, licences: all files that are not weights."""
    for file in sorted(source.iterdir()):
        name = file.name.lower()
        if (
            file.is_file()
            and not name.startswith(".")
            and not name.endswith((*_WEIGHTS, ".index.json"))
            and name not in _REPLACED
            and not (folder / file.name).exists()
        ):
            shutil.copyfile(file, folder / file.name)


def _merged(
    stored: dict[str, StoredTensor], blocks: Sequence[Path], quantized: Collection[str]
) -> dict[str, Bytes]:
    """Where each tensor of the output is now, in the order of the original."""
    originals = {
        (tensor.file, tensor.name): tensor
        for file in dict.fromkeys(entry.file for entry in stored.values())
        for tensor in tensors_in(file)
    }
    made = {tensor.name: tensor for file in blocks for tensor in tensors_in(file)}
    by_module: dict[str, list[Bytes]] = {}
    for tensor in made.values():
        by_module.setdefault(tensor.name.rpartition(".")[0], []).append(tensor)
    merged: dict[str, Bytes] = {}
    for name, entry in stored.items():
        if name in quantized:
            for tensor in sorted(by_module[name.removesuffix(".weight")], key=lambda t: t.name):
                if tensor.name not in stored or tensor.name == name:
                    merged[tensor.name] = tensor
        else:
            merged[name] = made.get(name) or _part(originals[entry.file, entry.name], name, entry)
    return merged


def _part(whole: Bytes, name: str, entry: StoredTensor) -> Bytes:
    """What is ``entry`` of a tensor, under its name in the output."""
    if entry.part is None:
        return replace(whole, name=name)
    index, start, end = entry.part
    matrices, rows, _ = whole.shape
    row = whole.size // (matrices * rows)
    return replace(
        whole,
        name=name,
        shape=entry.shape,
        start=whole.start + (index * rows + start) * row,
        size=(end - start) * row,
    )


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
