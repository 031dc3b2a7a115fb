"""The tensors of a checkpoint, known from its files' headers alone."""

from __future__ import annotations

import math
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tgi_cli.errors import CheckpointError
from tgi_cli.hub.streamed_model import RangeReader, RemoteWeights, remote_weights
from tgi_cli.models.gguf_weights import gguf_tensors
from tgi_cli.models.stored_tensor import QUANTIZED, StoredTensor
from tgi_cli.models.tensor_readers import ReadAhead, map_bytes
from tgi_cli.models.weight_files import (
    INDEX,
    file_header,
    gguf_headers,
    unreadable,
    weight_files,
)
from tgi_cli.quantization.formats import CheckpointFormat

_PEEKED = 1 << 16
"""Size limit of a tensor that describes the quantization of others."""

_SHOWN = 5
"""Names in an error message; the others are counted."""


def merge_quantized(
    stored: dict[str, StoredTensor], layout: CheckpointFormat
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, with one for each quantized weight."""
    plain = dict(stored)
    for module, tensors in layout.modules(stored).items():

        def peek(suffix: str, tensors: dict[str, StoredTensor] = tensors) -> Tensor:
            small = tensors[suffix]
            if math.prod(small.shape) > _PEEKED:
                raise CheckpointError(f"{small.name} is {list(small.shape)}: too large for it")
            return read_tensor(small)

        try:
            weight = layout.merge(module, tensors, peek)
        except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise CheckpointError(
                f"{module} is no weight quantized with {layout.name}: {error!r}",
                "download the model again, or correct its quantization_config",
            ) from error
        for tensor in tensors.values():
            del plain[tensor.name]
        parts = tuple(tensors[suffix] for suffix in weight.names)
        name = f"{module}.weight"
        plain[name] = StoredTensor(
            name, parts[0].file, weight.shape, QUANTIZED, parts, weight.read, weight.about
        )
    return plain


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint, by name. Reads no weights."""
    files = weight_files(path)
    if not files:
        gguf = gguf_headers(path)
        if gguf is not None:
            return gguf_tensors(gguf)
        raise CheckpointError(
            f"{path} has no model.safetensors and no {INDEX}",
            "download the model, or convert its weights to safetensors",
        )
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(
            f"{INDEX} names files that are not in {path}: {some(absent)}",
            "download the model again",
        )
    stored: dict[str, StoredTensor] = {}
    for file, names in files.items():
        header = file_header(file)
        for name in header if names is None else names:
            if name not in header:
                raise unreadable(file, f"it has no tensor {name}, which {INDEX} lists")
            stored[name] = StoredTensor(name, file, header[name].shape, header[name].dtype)
    return stored


def read_tensor(stored: StoredTensor) -> Tensor:
    """A tensor that is stored as it is, or rows of one."""
    if stored.span is not None:
        return map_bytes(stored.file, *stored.span)
    if (remote := remote_weights(stored.file.parent)) is not None:
        return _read_remote(stored, remote)
    try:
        with safe_open(stored.file, framework="pt") as tensors:
            if stored.part is not None:
                index, start, end = stored.part
                rows: Tensor = tensors.get_slice(stored.name)[index, start:end]
                return rows
            tensor: Tensor = tensors.get_tensor(stored.name)
    except (SafetensorError, OSError) as error:
        raise unreadable(stored.file, error) from error
    return tensor


def _read_remote(stored: StoredTensor, remote: RemoteWeights) -> Tensor:
    reader = ReadAhead([stored], pin=False, remote=RangeReader(remote))
    try:
        tensor = reader.read(stored)
    finally:
        reader.close()
    if stored.part is None:
        return tensor
    index, start, end = stored.part
    return tensor[index, start:end]


def some(names: list[str]) -> str:
    """Names for an error message, not all of them if they are many."""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
