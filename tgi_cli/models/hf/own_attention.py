"""Paged attention for models whose code computes attention itself, by matrix products.

Such code multiplies queries by keys, scales and masks the scores, takes their softmax, and
multiplies it by values. It is given stand-ins for keys and values, which record what is done to
them through torch's protocol for other types
(https://docs.pytorch.org/docs/stable/notes/extending.html#extending-torch-python-api). The product
with the values is where attention is computed. An operation that is not known is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from tgi_cli.models.hf.attention import AttentionContext, record_layer
from tgi_cli.models.hf.masks import Unsupported, WindowMask
from tgi_cli.models.hf.token_mixing import unwatched

_SAME = frozenset(
    {"view", "reshape", "transpose", "permute", "contiguous", "to", "float", "type", "type_as"}
    | {"unsqueeze", "squeeze"}
)
"""Methods that leave the numbers as they are, up to their arrangement."""


ATTENDS_ITSELF = ("GitModel",)
"""Models whose code for images alone calls attention through transformers' interface."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One layer's attention: its keys and values, both [1, heads, T, dimensions]."""

    context: AttentionContext
    layer: Hashable
    module: nn.Module | None
    key: Tensor
    value: Tensor

    @property
    def is_first_gpt(self) -> bool:
        """Whether the code is of OpenAI's GPT, which masks by products and sums."""
        return type(self.module).__module__ == "transformers.models.openai.modeling_openai"


@dataclass(frozen=True, slots=True, eq=False)
class StandIn:
    """Keys, values, or what was computed of them so far.

    Attributes:
        kind: what it stands for.
        call: the layer.
        shadow: a tensor on the meta device with the shape and dtype that the code expects.
        query: [1, heads, T, head_dim], of scores and probabilities.
        scale: factor of the scores.
        mask: that was added to the scores.
        bias: float32 [heads, D], as :class:`~tgi_cli.attention.PagedAttention` takes it.
    """

    kind: Literal["key", "value", "scores", "probabilities"]
    call: _Call
    shadow: Tensor
    query: Tensor | None = None
    scale: Any = 1.0
    mask: WindowMask | None = None
    bias: Tensor | None = None
    multiplied: bool = False
    """By a table of zeros for the keys that are hidden; something is to be added for them."""

    def __getattr__(self, name: str) -> Any:
        if name in _SAME:
            return partial(self._rearranged, name)
        if name in ("shape", "dtype", "device", "ndim"):
            return getattr(self.shadow, name)
        if name in ("size", "dim"):
            return getattr(self.shadow, name)
        if name == "masked_fill":
            return self._masked
        raise Unsupported(f"computes attention in a way of its own ({name} of {self.kind})")

    def _rearranged(self, name: str, *args: Any, **kwargs: Any) -> StandIn:
        with unwatched():
            shadow = getattr(self.shadow, name)(*_shadows(args), **kwargs)
        return replace(self, shadow=shadow)

    def __mul__(self, other: Any) -> StandIn:
        return self._scaled(other)

    def __truediv__(self, other: Any) -> StandIn:
        return self._scaled(1 / other)

    def __add__(self, other: Any) -> StandIn:
        if isinstance(other, Tensor) and self.mask is not None and self.call.is_first_gpt:
            return replace(self, multiplied=False)  # for keys that are hidden, or padding
        masked = self.mask is not None and other != WindowMask(None)
        if self.kind == "scores" and isinstance(other, WindowMask) and not masked:
            return replace(self, mask=self.mask or other)
        if self.kind == "scores" and isinstance(other, BiasStandIn) and self.bias is None:
            return replace(self, bias=other.bias)
        raise Unsupported("adds a bias of its own making to the scores")

    def _masked(self, mask: Any, value: object) -> StandIn:
        if not isinstance(mask, WindowMask):
            raise Unsupported("attends with a mask of its own making")
        return self + mask

    def _where(self) -> StandIn:
        """Masked by a table of GPT-Neo's, whose kind the module says."""
        module: Any = self.call.module
        kind = getattr(module, "attention_type", None)
        if self.kind != "scores" or kind not in ("global", "local"):
            raise Unsupported("attends with a mask of its own making")
        return self + WindowMask(module.config.window_size if kind == "local" else None)

    def _scaled(self, factor: Any) -> StandIn:
        if self.kind not in ("key", "scores"):
            raise Unsupported(f"multiplies the {self.kind} of attention")
        if self.bias is not None:
            raise Unsupported("scales the bias of scores")
        if (
            self.call.is_first_gpt and isinstance(factor, Tensor) and factor.ndim == 4
        ):  # a causal mask
            return replace(self, mask=WindowMask(None), multiplied=True)
        if isinstance(factor, Tensor) and (factor.numel() != 1 or factor.is_meta):
            raise Unsupported("scales scores by numbers that are not one constant")
        return replace(self, scale=self.scale * float(factor))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", str(func)), kwargs or {}
        if name == "where" and len(args) == 3 and isinstance(args[1], StandIn):
            return args[1]._where()
        if name in ("matmul", "bmm", "__matmul__", "__rmatmul__"):
            return _product(*args)
        if name == "baddbmm":
            return _added(*args, **kwargs)
        first = args[0]
        if not isinstance(first, StandIn):
            raise Unsupported(f"computes attention in a way of its own ({name})")
        if name == "softmax" and first.kind == "scores" and not first.multiplied:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if dim in (-1, first.shadow.ndim - 1):
                return replace(first, kind="probabilities")
        if name == "dropout" and first.kind == "probabilities":
            return first
        if name in ("max", "maximum") and first.kind == "scores":
            return first  # a lower limit of masked scores
        if name in ("mul", "__mul__", "multiply"):
            return first * args[1]
        if name in ("div", "true_divide", "__truediv__"):
            return first / args[1]
        raise Unsupported(f"computes attention in a way of its own ({name})")


class _Long:
    """A length from which any part may be cut."""

    def __sub__(self, other: object) -> int:
        return 0


@dataclass(frozen=True, eq=False)
class BiasStandIn:
    """A bias of scores that falls with the distance (ALiBi), as code passes it on.

    Attributes:
        bias: float32 [heads, 2], as :class:`~tgi_cli.attention.PagedAttention` takes it.
    """

    bias: Tensor
    shape = (0, 0, 0)

    def __getitem__(self, index: object) -> BiasStandIn:
        return self

    def size(self, dim: int) -> _Long:
        """Enough for any text."""
        return _Long()

    def __getattr__(self, name: str) -> Any:
        if name in ("to", "unsqueeze", "repeat"):
            return lambda *_, **__: self
        if name == "baddbmm":
            return lambda *args, **kwargs: _added(self, *args, **kwargs)
        raise Unsupported(f"computes the bias of scores in a way of its own ({name})")


def _shadows(args: Any) -> list[Any]:
    return [arg.shadow if isinstance(arg, StandIn) else arg for arg in args]


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _heads(tensor: Tensor, call: _Call, shadow: Tensor) -> Tensor:
    """Queries [1, heads, T, head_dim] of what is multiplied by keys as they are arranged."""
    if tensor.shape[:-2] != shadow.shape[:-2] or tensor.shape[-1] != call.key.shape[-1]:
        raise Unsupported("calls attention with tensors of another layout")
    if tensor.shape[:-2].numel() != call.key.shape[1]:
        raise Unsupported("calls attention with tensors of another layout")
    return tensor.reshape(1, -1, *tensor.shape[-2:])


def _product(left: Any, right: Any) -> Any:
    """Scores of queries and keys, or the output of probabilities and values."""
    if isinstance(left, Tensor) and isinstance(right, StandIn) and right.kind == "key":
        call, shadow = right.call, right.shadow
        tokens, width = call.key.shape[2:]
        if shadow.shape[-2:] != (width, tokens):
            raise Unsupported("calls attention with tensors of another layout")
        query = _heads(left, call, shadow)
        with unwatched():
            scores = torch.empty(*left.shape[:-1], tokens, dtype=left.dtype, device="meta")
        return replace(right, kind="scores", shadow=scores, query=query)
    if (
        isinstance(left, StandIn)
        and isinstance(right, StandIn)
        and (left.kind, right.kind) == ("probabilities", "value")
        and left.call is right.call
    ):
        return _attend(left, right)
    raise Unsupported("computes attention in a way of its own (a matrix product)")


def _added(bias: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """beta * bias + alpha * query @ key"""
    query, key = batch1, batch2
    if not isinstance(bias, BiasStandIn) or beta != 1:
        raise Unsupported("adds a bias of its own making to the scores")
    return _product(query, key) * alpha + bias


def _attend(left: StandIn, right: StandIn) -> Tensor:
    call, context = left.call, left.call.context
    key, value, query = call.key, call.value, left.query
    assert query is not None
    tokens, width = value.shape[2:]
    if right.shadow.shape[-2:] != (tokens, width):
        raise Unsupported("calls attention with tensors of another layout")
    shape = (*left.shadow.shape[:-1], width)
    if context.step is None:
        mask = left.mask or WindowMask(None)
        record_layer(context, call.layer, query, key, value, mask)
        context.biased |= left.bias is not None
        return torch.empty(shape, dtype=value.dtype, device="meta")
    output = context.step(
        context.cache_of(call.layer),
        query[0].transpose(0, 1).to(value.dtype),
        key[0].transpose(0, 1).to(value.dtype),
        value[0].transpose(0, 1),
        left.scale,
        bias=None if left.bias is None else left.bias.to(query.device),
    )
    return output.transpose(0, 1).reshape(shape)


def stand_ins(
    context: AttentionContext,
    layer: Hashable,
    key: Tensor,
    value: Tensor,
    module: nn.Module | None = None,
) -> tuple[StandIn, StandIn]:
    """For keys and values [1, heads, T, dimensions] of the layer that ``layer`` identifies."""
    if not key.ndim == value.ndim == 4 or len(key) != 1 or key.shape[:3] != value.shape[:3]:
        raise Unsupported("calls attention with tensors of another layout")
    call = _Call(context, layer, module, key, value)
    return StandIn("key", call, _meta(key)), StandIn("value", call, _meta(value))


def replace_own_attention(decoder: nn.Module, context: AttentionContext, cache: object) -> bool:
    """Give stand-ins to the modules that compute attention in a method ``_attn``.

    Returns whether the others get them of ``cache``, which is to be given to ``decoder``.
    """
    for name in ("build_alibi_tensor", "build_mpt_alibi_tensor"):
        if hasattr(decoder, name):
            setattr(decoder, name, _slopes_for(getattr(decoder, name), name))
    for module in decoder.modules():
        own: Any = getattr(type(module), "_attn", None)
        if type(module).__name__ == "GPTNeoXJapaneseAttention":
            own = _without_zeros
        if own is not None:
            cast(Any, module)._attn = MethodType(_wrapped(own, context), module)
        # A constant that transformers computes as it builds the module.
        scale = getattr(module, "scale_attn", None)
        if isinstance(scale, Tensor) and scale.is_meta:
            cast(Any, module).scale_attn = float(cast(Any, module).head_dim) ** 0.5
        if type(module).__name__ == "GitSelfAttention":
            module.forward = MethodType(_cached(type(module).forward, cache), module)
    return type(decoder).__name__ not in ATTENDS_ITSELF


def _cached(forward: Callable[..., Any], cache: object) -> Callable[..., Any]:
    """The forward pass of Git's layers with ``cache``: its text model would count tokens there."""

    def attend(module: nn.Module, hidden: Tensor, mask: Any = None, *_: object, **__: Any) -> Any:
        return forward(module, hidden, mask, cache)

    return attend


def _without_zeros(module: Any, query: Any, key: Any, value: Any, mask: Any = None) -> Any:
    """GPT-NeoX-Japanese's, which would add scores to a matrix of zeros."""
    scores = torch.matmul(query, key.transpose(-1, -2)) / module.norm_factor
    scores = scores if mask is None else scores + mask
    return torch.matmul(nn.functional.softmax(scores, dim=-1), value), None


def _slopes_for(build: Callable[..., Tensor], name: str) -> Callable[..., BiasStandIn]:
    """Replaces the function of a model that computes a bias for each key."""

    def slopes(*args: Any, **_: object) -> BiasStandIn:
        if name == "build_alibi_tensor":
            keys = build(torch.ones(1, 2), args[1], torch.float32)
        else:
            keys = build(args[0], 2, device=torch.device("cpu"))
        rise = (keys[:, 0, 1] - keys[:, 0, 0]).float()
        return BiasStandIn(torch.stack([torch.zeros_like(rise), -rise], dim=1))

    return slopes


def _wrapped(own: Callable[..., Any], context: AttentionContext) -> Callable[..., Any]:
    names = list(inspect.signature(own).parameters)

    def attn(module: Any, query: Tensor, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        if isinstance(key, Tensor):
            keys = key
            # OpenAI's first GPT keeps keys transposed.
            turned = key.shape[2:] == query.shape[:1:-1] and "k" in names
            keys = key.transpose(2, 3) if turned else key
            stand_key, stand_value = stand_ins(context, module, keys, value, module)
            key = stand_key.transpose(2, 3) if turned else stand_key
            value = stand_value
        else:
            call = replace(key.call, module=module)
            key, value = replace(key, call=call), replace(value, call=call)
        return own(module, query, key, value, *rest, **more)

    return attn
