"""The tensors of a GGUF file under the names that the model families expect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from tgi_cli.errors import CheckpointError, UnsupportedModelError
from tgi_cli.gguf.reader import GGUFFile, GGUFTensor
from tgi_cli.gguf.weight_names import WeightView, weight_views
from tgi_cli.models.stored_tensor import QUANTIZED, StoredTensor
from tgi_cli.quantization import gguf
from tgi_cli.quantization.block_weight import BlockWeight, CodedWeight

_SUPPORTED = ", ".join((*gguf.FLOATS, *gguf.LAYOUTS))


def gguf_tensors(file: GGUFFile) -> dict[str, StoredTensor]:
    """Every tensor, by name. Reads no weights.

    Raises:
        UnsupportedModelError: weights of a type that is not supported.
        ModelError: keys and shapes contradict each other.
    """
    found: dict[str, StoredTensor] = {}
    for view in weight_views(file):
        if view.name in found:
            raise CheckpointError(
                f"{file.path} has {view.name} twice, as {view.tensor.name}, too",
                "download another file of the model",
            )
        found[view.name] = _stored(view)
    return found


def rounded_weights(stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> int:
    """How many matrices in float16 lose bits in ``dtype``."""
    if dtype != torch.bfloat16:
        return 0
    return sum(each.dtype == "F16" and len(each.shape) > 1 for each in stored.values())


def _stored(view: WeightView) -> StoredTensor:
    kind, file = view.tensor.type, view.tensor.file
    data = _bytes_of(view.tensor, (view.start, view.size))
    if view.beside is not None and view.final_shape is not None:
        both = (data, _bytes_of(view.beside, (view.beside.start, view.beside.size)))
        for each in (view.tensor, view.beside):
            if each.type.name not in (*gguf.FLOATS, *gguf.LAYOUTS):
                raise _unsupported(each)
        return StoredTensor(view.name, file, view.final_shape, "F32", both, partial(_joined, view))
    if kind.name in gguf.FLOATS:
        shape = view.final_shape or view.shape
        if view.transposed and len(shape) == 2:
            shape = (shape[1], shape[0])
        return StoredTensor(view.name, file, shape, kind.name, (data,), partial(_floats, view))
    if kind.name not in gguf.LAYOUTS or len(view.shape) != 2:
        raise _unsupported(view.tensor)
    return StoredTensor(
        view.name, file, view.shape, QUANTIZED, (data,), partial(_blocks, view), kind.name
    )


def _bytes_of(tensor: GGUFTensor, span: tuple[int, int]) -> StoredTensor:
    return StoredTensor(tensor.name, tensor.file, (span[1],), "U8", span=span)


def _unsupported(tensor: GGUFTensor) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{tensor.file}: {tensor.name} is {tensor.type.name} {list(tensor.shape)}, which is not "
        "supported",
        f"download a file in one of {_SUPPORTED}",
    )


def _joined(view: WeightView, first: Tensor, second: Tensor) -> Tensor:
    """The weight that two tensors make, in float32."""
    assert view.beside is not None
    assert view.join is not None
    joined: Tensor = view.join(_numbers(view.tensor, first), _numbers(view.beside, second))
    return joined


def _numbers(tensor: GGUFTensor, data: Tensor) -> Tensor:
    """A whole tensor in float32."""
    if tensor.type.name in gguf.FLOATS:
        return gguf.read_floats(tensor.type.name, tensor.shape, data).float()
    rows = math.prod(tensor.shape[:-1])
    weight = BlockWeight(tensor.type, (data.view(rows, -1),))
    return weight.dequantize(torch.float32).view(tensor.shape)


def _floats(view: WeightView, data: Tensor) -> Tensor:
    tensor = gguf.read_floats(view.tensor.type.name, view.shape, data)
    if view.rows is not None:
        tensor = view.rows(tensor)
    if view.columns:
        parts = tensor.reshape(len(tensor), len(view.columns), -1)
        tensor = parts[:, list(view.columns)].flatten(1)
    if view.numbers is not None:
        tensor = view.numbers(tensor.float())
    if view.final_shape is not None:
        return tensor.view(view.final_shape)
    return tensor.T if view.transposed and tensor.ndim == 2 else tensor


def _blocks(view: WeightView, data: Tensor) -> CodedWeight:
    weight = BlockWeight(view.tensor.type, (data.view(view.shape[0], -1),))
    if view.rows is not None:
        weight = weight.rows(view.rows)
    return weight.reordered(view.columns) if view.columns else weight
