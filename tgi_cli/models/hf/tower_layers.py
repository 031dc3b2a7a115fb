"""Small operations of image encoders on a CPU, where transformers' take a tenth of the time.

A module is replaced for what it computes, not for its class: it is tried with a few numbers first,
and left as it is unless the result is that of the replacement.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as torch_linear
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from tgi_cli.kernels.linear import ACTIVATIONS, Epilogue
from tgi_cli.kernels.linear import linear as packed_linear
from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.layers import Build, ops
from tgi_cli.layers.linear import ColumnParallelLinear, Projection
from tgi_cli.models.hf.tower_pieces import by_pieces

_SMALL = (4, 6)
"""Inputs and inner features of the modules that are tried."""

_ROTATION = "apply_rotary_pos_emb_vision"
"""transformers' function for queries and keys [T, heads, dim] of the encoders of Qwen's kin."""

_ROTATED_ROWS = 128
"""Tokens that are rotated at a time: their float32 copies stay in the processor's cache."""


def replace_operations(core: nn.Module, build: Build) -> None:
    """Replace norms, feed-forward blocks, rotations and patch embeddings of a model's tower.

    To be called while its linear layers are transformers', and before it has weights.
    """
    rebound: dict[type, FunctionType] = {}
    for path, module in list(core.named_modules()):
        if _is_rms_norm(module):
            _bind(module, _rms_norm)
        elif type(module) is nn.Conv3d and _covers_patches(module):
            _bind(module, _patch_product)
        elif (names := _feed_forward(module)) is not None:
            _bind(module, _activated(*names))
        elif (activation := _gated_activation(module)) is not None:
            parent, _, name = path.rpartition(".")
            replaced = _GatedFeedForward(build, module, activation)
            setattr(core.get_submodule(parent), name, replaced)
        elif _rotates(module):
            kind = type(module)
            if kind not in rebound:
                rebound[kind] = _with_rotation_by_slices(cast(Any, kind).forward)
            _bind(module, rebound[kind])


def encode_tiles_alone(core: nn.Module) -> bool:
    """Let a tower encode the tiles of an image one after the other; returns whether it has such.

    What is computed of a tile then stays in the processor's cache from one operation to the next,
    the memory that it takes is that of one tile, and a run may pause between tiles.
    """
    found = False
    for module in core.modules():
        if module is core or not isinstance(module, PreTrainedModel):
            continue
        parameters = list(inspect.signature(inspect.unwrap(type(module).forward)).parameters)
        if parameters[1:2] == ["pixel_values"]:
            _bind(module, _tile_by_tile)
            found = True
    return found


def _bind(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let a module compute ``forward(module, ...)``."""
    module.__dict__["forward"] = forward.__get__(module)


# ---------------------------------------------------------------------- tiles


def _tile_by_tile(self: Any, pixel_values: Tensor, *more: Any, **others: Any) -> Any:
    """The forward pass of a model for [tiles, channels, height, width]."""
    whole = type(self).forward
    count = len(pixel_values)
    if pixel_values.dim() != 4 or count < 2 or more:
        return whole(self, pixel_values, *more, **others)
    outputs = []
    for index in range(count):
        own = slice(index, index + 1)
        given = {
            name: value[own] if isinstance(value, Tensor) and value.shape[:1] == (count,) else value
            for name, value in others.items()
        }
        outputs.append(whole(self, pixel_values[own], **given))
    return _joined(outputs)


def _joined(parts: list[Any]) -> Any:
    """Outputs of single tiles as one."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, ModelOutput):
        return type(first)(**{name: _joined([part[name] for part in parts]) for name in first})
    if isinstance(first, tuple | list):
        return tuple(map(_joined, map(list, zip(*parts, strict=True))))
    return first


# ---------------------------------------------------------------------- norms


def _is_rms_norm(module: nn.Module) -> bool:
    if not type(module).__name__.endswith("RMSNorm"):
        return False
    eps = getattr(module, "variance_epsilon", None)
    weight = torch.linspace(0.5, 1.5, 8)
    x = torch.linspace(-1.0, 2.0, 24).view(3, 8)
    given = SimpleNamespace(weight=weight, variance_epsilon=eps)
    return _agree(lambda: type(module).forward(given, x), ops.rms_norm, x, weight, eps)


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    return ops.rms_norm(rows, self.weight, self.variance_epsilon).view(hidden_states.shape)


# ---------------------------------------------------------------------- patches


def _covers_patches(module: nn.Conv3d) -> bool:
    """Whether it may be a product: its kernels lie side by side."""
    beside = module.stride == module.kernel_size and module.groups == 1
    return beside and set(module.dilation) == {1} and set(module.padding) == {0}


def _patch_product(self: Any, x: Tensor) -> Tensor:
    """Project patches [N, channels, *kernel] by a product: oneDNN's convolution is made for images.

    In float32 sums stay in transformers' order, with which results are compared.
    """
    if x.dtype == torch.float32 or x.shape[2:] != self.weight.shape[2:]:
        return nn.Conv3d.forward(self, x)
    product = torch_linear(x.flatten(1), self.weight.flatten(1), self.bias)
    return product[..., None, None, None]


# ---------------------------------------------------------------------- feed-forward blocks


def _feed_forward(module: nn.Module) -> tuple[str, str, str] | None:
    """Names of the layers of down(activation(up(x))), and of the function; None if it is none."""
    for up, down in (("fc1", "fc2"), ("linear_fc1", "linear_fc2")):
        activation = _plain_activation(module, up, down)
        if activation is not None:
            return up, down, activation
    return None


def _plain_activation(module: nn.Module, up: str, down: str) -> str | None:
    function = _function(module, up, down)
    activation = None if function is None else activation_of(function[1])
    if function is None or activation is None:
        return None
    parts = _try_layers(up, down)
    given = SimpleNamespace(**parts, **{function[0]: function[1]})
    x = torch.linspace(-2.0, 3.0, 3 * _SMALL[0]).view(3, -1)
    same = _agree(
        lambda: type(module).forward(given, x),
        lambda x: parts[down](ops.ACTIVATIONS[activation](parts[up](x))),
        x,
    )
    return activation if same else None


def _gated_activation(module: nn.Module) -> str | None:
    """The function of down(activation(gate(x)) * up(x)); None if a module is something else."""
    function = _function(module, "gate_proj", "up_proj", "down_proj")
    if function is None:
        return None
    name, activate = function
    parts = _try_layers("gate_proj", "down_proj", "up_proj")
    activation = activation_of(activate)
    if activation is None:
        return None
    gate, up, down = parts["gate_proj"], parts["up_proj"], parts["down_proj"]
    given = SimpleNamespace(**parts, **{name: activate})
    x = torch.linspace(-2.0, 3.0, 3 * _SMALL[0]).view(3, -1)
    same = _agree(
        lambda: type(module).forward(given, x),
        lambda x: down(ops.ACTIVATIONS[activation](gate(x)) * up(x)),
        x,
    )
    whole: Any = module
    alike = (whole.gate_proj.bias is None) == (whole.up_proj.bias is None)
    return activation if same and alike else None


def _function(module: nn.Module, *layers: str) -> tuple[str, Callable[[Tensor], Tensor]] | None:
    """Name and function of a module that has these linear layers and one activation beside."""
    children = dict(module.named_children())
    if any(type(children.get(name)) is not nn.Linear for name in layers):
        return None
    for name in ("activation_fn", "act_fn", "act"):
        function = getattr(module, name, None)
        if callable(function):
            return name, function
    return None


def _try_layers(up: str, down: str, *others: str) -> dict[str, nn.Linear]:
    """Small linear layers with weights that are always the same."""
    inputs, inner = _SMALL
    found: dict[str, nn.Linear] = {}
    for number, name in enumerate((up, *others, down)):
        sizes = (inner, inputs) if name == down else (inputs, inner)
        layer = nn.Linear(*sizes)
        with torch.no_grad():
            for each in layer.parameters():
                each.copy_(torch.linspace(-1.0, 1.5, each.numel()).view_as(each) * (number + 1))
        found[name] = layer
    return found


def activation_of(function: Callable[[Tensor], Tensor]) -> str | None:
    """The name of an activation, by its values."""
    x = torch.linspace(-12.0, 12.0, 193)
    names = ("silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu")
    return next(
        (name for name in names if _agree(lambda: function(x), ops.ACTIVATIONS[name], x)), None
    )


def _activated(up: str, down: str, activation: str) -> Callable[[Any, Tensor], Tensor]:
    """The forward pass of down(activation(up(x))), with the function after up's product."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        layer = getattr(self, up)
        packed = getattr(layer, "packed", None)
        if not isinstance(packed, PackedMatrix):
            inner = ops.ACTIVATIONS[activation](layer(hidden_states))
        else:
            kind = Epilogue.ACTIVATE
            inner = _product(self, hidden_states, packed, layer.bias, kind, activation)
        output: Tensor = getattr(self, down)(inner)
        return output

    return forward


class _GatedFeedForward(nn.Module):
    """down(activation(gate(x)) * up(x)), with gate and up as one product."""

    def __init__(self, build: Build, module: Any, activation: str) -> None:
        super().__init__()
        inputs, inner = module.gate_proj.in_features, module.gate_proj.out_features
        parts = {"gate_proj": Projection(inner), "up_proj": Projection(inner)}
        biased = module.gate_proj.bias is not None
        self.activation = activation
        self.gate_up_proj = ColumnParallelLinear(build, inputs, parts, biased)
        self.gate_up_proj.paired = True
        self.down_proj = module.down_proj

    def forward(self, hidden_state: Tensor) -> Tensor:
        layer = self.gate_up_proj
        packed = layer.packed
        if isinstance(packed, PackedMatrix):
            kind = Epilogue.GATED
            inner = _product(self, hidden_state, packed, layer.bias, kind, self.activation)
        else:
            rows = layer(hidden_state.reshape(-1, hidden_state.shape[-1]))
            inner = ops.gated(rows, self.activation).view(*hidden_state.shape[:-1], -1)
        output: Tensor = self.down_proj(inner)
        return output


def _product(
    module: nn.Module,
    x: Tensor,
    packed: PackedMatrix,
    bias: Tensor | None,
    epilogue: Epilogue,
    activation: str,
) -> Tensor:
    number = ACTIVATIONS[activation]
    operations = 2.0 * packed.inputs * packed.out
    return by_pieces(
        module, x, operations, lambda rows: packed_linear(rows, packed, bias, epilogue, number)
    )


# ---------------------------------------------------------------------- rotations


def _rotates(module: nn.Module) -> bool:
    forward = type(module).forward
    return isinstance(forward, FunctionType) and _ROTATION in forward.__code__.co_names


def _with_rotation_by_slices(forward: FunctionType) -> FunctionType:
    """The same function, but for :data:`_ROTATION`, which it looks up by name."""
    names = dict(forward.__globals__)
    names[_ROTATION] = _by_slices(names[_ROTATION])
    parts = (forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    found = FunctionType(*parts)
    found.__kwdefaults__ = forward.__kwdefaults__
    return found


def _by_slices(rotate: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """``rotate`` some tokens at a time, in place where that loses nothing."""

    def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if query.dim() != 3 or cos.dim() != 2 or len(cos) != len(query):
            found: tuple[Tensor, Tensor] = rotate(query, key, cos, sin)
            return found
        for part in _slices(len(query)):
            query[part], key[part] = rotate(query[part], key[part], cos[part], sin[part])
        return query, key

    return rotated


def _slices(count: int) -> Iterator[slice]:
    for begin in range(0, count, _ROTATED_ROWS):
        yield slice(begin, begin + _ROTATED_ROWS)


def _agree(theirs: Callable[[], Any], ours: Callable[..., Tensor], *arguments: Any) -> bool:
    """Whether a module computes what its replacement does."""
    try:
        with torch.inference_mode():
            found, wanted = theirs(), ours(*arguments)
    except Exception:  # of a module that is something else
        return False
    if not isinstance(found, Tensor) or found.shape != wanted.shape:
        return False
    return bool(torch.allclose(found, wanted, rtol=1e-5, atol=1e-5))
