"""A transformers causal language model whose weights stay on disk until they are needed.

The modeling code is transformers', on the meta device; weights are read from safetensors, plain or
quantized, by transformers' own mapping of names. One decoder block at a time is in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.pytorch_utils import Conv1D

from tgi_cli.errors import CheckpointError, UnsupportedModelError
from tgi_cli.models.checkpoint import merge_quantized, read_headers, read_tensor, some
from tgi_cli.models.config import ModelConfig, read_config
from tgi_cli.models.hf.names import sources
from tgi_cli.models.registry import checkpoint_format
from tgi_cli.models.size_check import check_sizes
from tgi_cli.models.stored_tensor import QUANTIZED, StoredTensor
from tgi_cli.models.weight_map import Source
from tgi_cli.quantization.block_weight import CodedWeight
from tgi_cli.quantize.checkpoint_map import TensorIndex, locate_tensors, unstack_experts


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A linear layer of the checkpoint, and its weight in the model.

    Attributes:
        name: name of the stored weight without ``.weight``: ``model.layers.0.self_attn.q_proj``.
        stored: name of the stored tensor.
        shape: (outputs, inputs).
        parameter: the model's parameter that contains the weight.
        index: the weight's part of the parameter; empty for all of it.
        transposed: whether the stored tensor, and the model's, are [inputs, outputs].
        expert: number of the expert, if the parameter contains those of all experts.
    """

    name: str
    stored: str
    shape: tuple[int, int]
    parameter: str
    index: TensorIndex = ()
    transposed: bool = False
    expert: int | None = None


class OffloadedModel:
    """A model without weights: decoder blocks, and modules before and after them.

    Args:
        folder: a checkpoint, plain or quantized.
        device: destination of weights; on a CPU they are float32, else in the checkpoint's dtype.
        trust_remote_code: run code from the checkpoint.

    Attributes:
        whole: the transformers model.
        decoder: its part that computes hidden states from ids.
        blocks: the decoder's layers; ``block_paths`` are their names.
        stored: the checkpoint's tensors by name, with one entry for each quantized weight and for
            each matrix of stacked experts.

    Raises:
        UnsupportedModelError: it is not a causal language model of transformers, or its list of
            layers cannot be determined.
        CheckpointError, ModelError: its files are invalid.
    """

    def __init__(self, folder: Path, device: torch.device, trust_remote_code: bool = False) -> None:
        self.config = read_config(folder, trust_remote_code)
        self.device = device
        self.dtype: torch.dtype = (
            torch.float32 if device.type == "cpu" else getattr(torch, self.config.dtype)
        )
        layout = checkpoint_format(self.config)
        headers = read_headers(folder)
        check_sizes(folder, self.config.raw, layout is not None)
        self.whole = _model(self.config, self.dtype)
        self.decoder = self.whole.get_decoder()
        at, self.blocks = _blocks(self.whole, self.decoder)
        self.block_paths = [f"{at}.{index}" for index in range(len(self.blocks))]
        self._weights: dict[str, Tensor] = {
            **dict(self.whole.named_parameters()),
            **dict(self.whole.named_buffers()),
        }
        stored = headers if layout is None else merge_quantized(headers, layout)
        self.stored = unstack_experts(self.whole, self._weights, stored)
        self._tied: dict[str, str] = dict(self.whole.all_tied_weights_keys)
        self._sources = sources(self.whole, self._weights, self.stored)
        self._stored_parts = {
            name: locate_tensors(source, self.stored, tuple(self._weights[name].shape))
            for name, source in self._sources.items()
            if name in self._weights
        }
        self._compute_buffers()
        self.whole.eval()

    def source(self, parameter: str) -> Source | None:
        """Source of the model's tensor, or None if the checkpoint does not have it."""
        tied = self._tied.get(parameter, parameter)
        return self._sources.get(parameter) or self._sources.get(tied)

    def linear_layers(self, block: int) -> list[LinearLayer]:
        """The linear layers of a block whose weights are separate in the checkpoint."""
        return list(self._linear_layers(self.block_paths[block], self.blocks[block]))

    def _linear_layers(self, path: str, block: nn.Module) -> Iterator[LinearLayer]:
        for inner, module in block.named_modules():
            transposed = isinstance(module, Conv1D)
            stacked = is_experts(module)
            if not (isinstance(module, nn.Linear) or transposed or stacked):
                continue
            prefix = f"{path}.{inner}" if inner else path
            for own in ("gate_up_proj", "up_proj", "down_proj") if stacked else ("weight",):
                parameter = f"{prefix}.{own}"
                for stored, index in self._stored_parts.get(parameter) or ():
                    shape = self.stored[stored].shape
                    if len(shape) != 2 or not stored.endswith(".weight"):
                        continue
                    quantized = self.stored[stored].dtype == QUANTIZED
                    sizes = (shape[1], shape[0]) if transposed and not quantized else shape
                    yield LinearLayer(
                        stored.removesuffix(".weight"),
                        stored,
                        (sizes[0], sizes[1]),
                        parameter,
                        index,
                        transposed,
                        index[0] if stacked and isinstance(index[0], int) else None,
                    )

    def stored_parts(self, parameter: str) -> list[tuple[str, TensorIndex]] | None:
        """Stored tensors and their indices in the model's, or None if they do not tile it."""
        return self._stored_parts.get(parameter)

    def tensor(self, stored: str) -> Tensor:
        """Read a tensor of the checkpoint; a quantized one is dequantized to float32."""
        entry = self.stored[stored]
        if entry.read is None:
            return read_tensor(entry)
        weight = entry.read(*map(read_tensor, entry.parts))
        return weight.dequantize(torch.float32) if isinstance(weight, CodedWeight) else weight

    def materialize(self, path: str, recurse: bool = True) -> None:
        """Read the weights of the module at ``path``.

        Raises:
            CheckpointError: weights are missing.
        """
        missing = []
        for name, empty in list(self._own(path, recurse)):
            source = self.source(name)
            if source is None:
                if isinstance(empty, nn.Parameter):
                    missing.append(name)
            elif empty.is_meta:
                self._set(name, self._read(name, source, empty))
        if missing:
            raise CheckpointError(
                f"{len(missing)} tensors are missing in the checkpoint: {some(missing)}",
                "download the model again, or correct its config.json",
            )

    def release(self, path: str, recurse: bool = True) -> None:
        """Free the memory of the module's weights."""
        for name, weight in list(self._own(path, recurse)):
            if self.source(name) is not None:
                self._set(name, torch.empty_like(weight, device="meta"))

    def materialize_rest(self, head: bool) -> None:
        """Read the weights outside of the blocks; those after the decoder only with ``head``."""
        for path in self._rest(head):
            self.materialize(path, recurse=False)

    def release_rest(self) -> None:
        """Free the memory of the weights outside of the blocks."""
        for path in self._rest(head=True):
            self.release(path, recurse=False)

    def share_rest(self, other: OffloadedModel) -> None:
        """Share equal weights outside of the blocks with ``other``, where they are in memory."""
        for path in self._rest(head=True):
            for name, _ in list(self._own(path, recurse=False)):
                ours, theirs = self.source(name), other.source(name)
                if ours is None or theirs is None or ours != theirs or ours.join is not None:
                    continue
                plain = all(side.stored[ours.names[0]].read is None for side in (self, other))
                if plain and torch.equal(*(each.tensor(ours.names[0]) for each in (self, other))):
                    own = dict(other.whole.get_submodule(path).named_parameters(recurse=False))
                    if (twin := own.get(name.rpartition(".")[2])) is not None:
                        self._set(name, twin.data)

    def _rest(self, head: bool) -> list[str]:
        inside = {module for block in self.blocks for module in block.modules()}
        wanted = set(self.decoder.modules()) - inside
        if head:
            wanted.add(self.whole)
            for child in self.whole.children():
                parts = set(child.modules())
                if self.decoder not in parts:
                    wanted |= parts
        return [path for path, module in self.whole.named_modules() if module in wanted]

    def _own(self, path: str, recurse: bool) -> Iterator[tuple[str, Tensor]]:
        module = self.whole.get_submodule(path)
        prefix = f"{path}." if path else ""
        for name, weight in module.named_parameters(recurse=recurse, remove_duplicate=False):
            yield prefix + name, weight
        for name, buffer in module.named_buffers(recurse=recurse):
            if prefix + name in self._sources:
                yield prefix + name, buffer

    def _set(self, name: str, tensor: Tensor) -> None:
        path, _, own = name.rpartition(".")
        module = self.whole.get_submodule(path)
        if own in module._parameters:
            module._parameters[own] = nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[own] = tensor

    def _read(self, name: str, source: Source, empty: Tensor) -> Tensor:
        tied = self._tied.get(name)
        if tied is not None and not (twin := self.whole.get_parameter(tied)).is_meta:
            shared: Tensor = twin.data
            return shared
        parts = self._stored_parts.get(name) or self._stored_parts.get(tied or name)
        if parts is None:
            made = source.view(*(self.tensor(each) for each in source.names))
            if tuple(made.shape) != tuple(empty.shape):
                raise CheckpointError(f"{name} is {list(made.shape)}, not {list(empty.shape)}")
            whole: Tensor = made.to(self.device, empty.dtype)
            return whole
        filled = torch.empty(empty.shape, dtype=empty.dtype, device=self.device)
        module = self.whole.get_submodule(name.rpartition(".")[0])
        for stored, index in parts:
            tensor = self.tensor(stored)
            if self.stored[stored].dtype == QUANTIZED and isinstance(module, Conv1D):
                tensor = tensor.T
            if tensor.shape != filled[index].shape:
                wanted = list(filled[index].shape)
                raise CheckpointError(f"{stored} is {list(tensor.shape)}, not {wanted}")
            filled[index].copy_(tensor)
        return filled

    def _compute_buffers(self) -> None:
        """Compute buffers that are not in the checkpoint (rotary frequencies) by transformers."""
        parts = set(self.decoder.modules())
        for path, module in self.whole.named_modules():
            if module not in parts:
                continue
            names = [
                name
                for name, _ in module.named_buffers(recurse=False)
                if f"{path}.{name}".lstrip(".") not in self._sources
            ]
            if not names:
                continue
            made: list[list[Tensor]] = []
            for filled in (0, 1):  # elements that still differ were not computed
                for name in names:
                    empty = cast(Tensor, module._buffers[name])
                    module._buffers[name] = torch.full_like(empty, filled, device="cpu")
                self.whole._init_weights(module)
                made.append([cast(Tensor, module._buffers[name]) for name in names])
            for name, first, second in zip(names, *made, strict=True):
                if not torch.equal(first, second):
                    raise UnsupportedModelError(
                        f"{type(self.whole).__name__} has a buffer that cannot be computed: "
                        f"{path}.{name}"
                    )
                module._buffers[name] = second.to(self.device)


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the weights of all experts, [experts, outputs, inputs] each."""
    own = dict(module.named_parameters(recurse=False))
    return (
        hasattr(module, "has_gate")
        and not getattr(module, "is_transposed", False)
        and "down_proj" in own
        and own["down_proj"].ndim == 3
        and not getattr(module, "has_post_expert_norm", False)
    )


def _model(config: ModelConfig, dtype: torch.dtype) -> Any:
    """Create the transformers model on the meta device."""
    name = config.architecture
    known: Any = getattr(transformers, name, None)
    if known is None:
        code = config.get("auto_map", dict, {}).get("AutoModelForCausalLM")
        if code is None:
            raise UnsupportedModelError(
                f"architecture {name} is unknown to transformers {transformers.__version__}",
                "check 'architectures' in config.json, or install a newer transformers",
            )
        if not config.trust_remote_code:
            raise UnsupportedModelError(
                f"architecture {name} is defined by code in the checkpoint",
                "--trust-remote-code runs that code, if you trust it",
            )
        known = get_class_from_dynamic_module(code, str(config.path))
    trusted = config.trust_remote_code and not known.__module__.startswith("transformers.")
    own: Any = AutoConfig.from_pretrained(config.path, trust_remote_code=trusted)
    if own.is_encoder_decoder or not hasattr(known, "get_decoder"):
        raise UnsupportedModelError(f"architecture {name} is not a causal language model")
    attention = "sdpa" if known._supports_sdpa else "eager"
    with torch.device("meta"):
        model: Any = known._from_config(
            own, dtype=dtype, attn_implementation=attention, experts_implementation="eager"
        )
    for pattern, own_dtype in model._get_dtype_plan(dtype).items():
        for path, weight in model.state_dict(keep_vars=True).items():
            if re.search(pattern.replace("*", ".*"), path):
                weight.data = weight.data.to(own_dtype)
    return model


def _blocks(whole: nn.Module, decoder: nn.Module) -> tuple[str, nn.ModuleList]:
    """The decoder's list of layers with its path: the list with the most weights."""
    parts = set(decoder.modules())
    lists = {
        path: module
        for path, module in whole.named_modules()
        if isinstance(module, nn.ModuleList) and module in parts
    }
    if not lists:
        raise UnsupportedModelError(f"{type(whole).__name__} has no list of layers")
    outermost = {
        path: module
        for path, module in lists.items()
        if not any(path.startswith(f"{other}.") for other in lists)
    }
    at = max(outermost, key=lambda path: sum(each.numel() for each in lists[path].parameters()))
    return at, outermost[at]


def stored_size(stored: StoredTensor) -> int:
    """Size of a tensor on disk in bytes; of a quantized weight the sum of its parts."""
    if stored.parts:
        return sum(map(stored_size, stored.parts))
    bits = re.search(r"\d+", stored.dtype)
    return torch.Size(stored.shape).numel() * (int(bits[0]) if bits else 8) // 8
