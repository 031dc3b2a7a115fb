"""Writes a quantized checkpoint from finished blocks and unchanged tensors, byte for byte.

https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tgi_cli.hub.safetensors_header import TensorEntry, read_header
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.stored_tensor import StoredTensor
from tgi_cli.quantization.algorithms.layout import quantization_config, quantize_config
from tgi_cli.quantization.algorithms.recipe import Recipe

_CHUNK = 16 << 20


@dataclass(frozen=True, slots=True)
class TensorSpan(TensorEntry):
    """A tensor of a file: its entry, its name and the file."""

    name: str
    file: Path

    @property
    def alignment(self) -> int:
        """Size of an element in bytes."""
        return self.size // self.elements if self.elements else 1


def tensors_in(file: Path) -> list[TensorSpan]:
    """The tensors of a safetensors file."""
    return [
        TensorSpan(entry.dtype, entry.shape, entry.start, entry.size, name, file)
        for name, entry in read_header(file).items()
    ]


def write_file(path: Path, tensors: Iterable[TensorSpan]) -> None:
    """Copy tensors into one file, largest elements first so that all are aligned."""
    ordered = sorted(tensors, key=lambda tensor: -tensor.alignment)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.size],
        }
        offset += tensor.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as target:
        target.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            with tensor.file.open("rb") as source:
                source.seek(tensor.start)
                left = tensor.size
                while left:
                    piece = source.read(min(_CHUNK, left))
                    if not piece:
                        raise OSError(f"{tensor.file} ended while it was copied")
                    target.write(piece)
                    left -= len(piece)


def write_shards(folder: Path, tensors: Mapping[str, TensorSpan], max_bytes: int) -> int:
    """Write ``model.safetensors``, or files of at most ``max_bytes`` with an index.

    A larger tensor gets a file of its own. Returns the size of all tensors in bytes.
    """
    shards: list[list[TensorSpan]] = [[]]
    size = 0
    for tensor in tensors.values():
        if shards[-1] and size + tensor.size > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.size
    total = sum(tensor.size for tensor in tensors.values())
    if len(shards) == 1:
        write_file(folder / "model.safetensors", shards[0])
        return total
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(folder / file, shard)
        weight_map |= dict.fromkeys((tensor.name for tensor in shard), file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    text = json.dumps(index, indent=2) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return total


SHARD_BYTES = 4 << 30
"""Default size limit of a file of weights, in bytes."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
_REPLACED = ("config.json", "readme.md", "quantize_config.json", "quant_config.json")


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
    """Write everything but the model card into ``folder``; return the size of all tensors.

    Args:
        folder: created here.
        config: configuration of the original.
        stored: tensors of the original; stacked experts may be split.
        blocks: files with the tensors of the quantized blocks.
        quantized: names of the stored tensors that these replace.
        recipe: how they were quantized.
        ignored: linear layers that were not quantized.
        shard_bytes: size limit of a file of weights.
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
    _copy_other_files(config.path, folder)
    return total


def _copy_other_files(source: Path, folder: Path) -> None:
    """Copy all files that are not weights: tokenizer, generation config, code, licences."""
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
) -> dict[str, TensorSpan]:
    """Locate each tensor of the output, in the order of the original."""
    originals = {
        (tensor.file, tensor.name): tensor
        for file in dict.fromkeys(entry.file for entry in stored.values())
        for tensor in tensors_in(file)
    }
    made = {tensor.name: tensor for file in blocks for tensor in tensors_in(file)}
    by_module: dict[str, list[TensorSpan]] = {}
    for tensor in made.values():
        by_module.setdefault(tensor.name.rpartition(".")[0], []).append(tensor)
    merged: dict[str, TensorSpan] = {}
    for name, entry in stored.items():
        if name in quantized:
            for tensor in sorted(by_module[name.removesuffix(".weight")], key=lambda t: t.name):
                if tensor.name not in stored or tensor.name == name:
                    merged[tensor.name] = tensor
        else:
            merged[name] = made.get(name) or take_part(
                originals[entry.file, entry.name], name, entry
            )
    return merged


def take_part(whole: TensorSpan, name: str, entry: StoredTensor) -> TensorSpan:
    """The part of ``whole`` that ``entry`` describes, under its name in the output."""
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
