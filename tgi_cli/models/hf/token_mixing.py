"""Notices operations that mix the tokens of a step outside of attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tgi_cli.models.hf.masks import Unsupported

_SHIFT = 8
"""Limit of the tokens by which a convolution might shift them."""

_CONTRACTIONS = frozenset({"mm", "bmm", "addmm", "baddbmm", "dot", "mv"})
_ALONG = dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "sort", "flip", "_softmax"), 1)
_ALONG |= {"topk": 2, "roll": 2}
"""Operations along a dimension, and the index of the argument that names it; default: the last
dimension."""


_unwatched: ContextVar[bool] = ContextVar("unwatched", default=False)


@contextmanager
def unwatched() -> Iterator[None]:
    """Let tokens be mixed within the block: what replaces it keeps sequences apart."""
    token = _unwatched.set(True)
    try:
        yield
    finally:
        _unwatched.reset(token)


class TokenMixingDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that mix tokens outside of attention, since only attention is cached.

    The dimension of tokens is recognised by its size, which no other dimension has.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = False
        """Whether tokens were counted, as in models that do not get their positions."""
        self._tokens = tokens
        self._near = {tokens + shift for shift in range(-_SHIFT, _SHIFT + 1) if shift}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if _unwatched.get():
            return output
        name, tokens = func.overloadpacket.__name__, self._tokens
        tensors = [x for x in args if isinstance(x, Tensor)]
        if name == "arange" and output.shape[0] == tokens:
            self.counts = True
        if name == "convolution" and tokens in tensors[0].shape:
            raise Unsupported("convolves tokens outside of attention")
        if name in _CONTRACTIONS and tensors[-2].shape[-1] == tokens:
            raise Unsupported("sums up tokens outside of attention")
        if name in _ALONG:
            dims = args[_ALONG[name]] if len(args) > _ALONG[name] else -1
            for dim in dims if isinstance(dims, list) else [dims]:
                if tensors[0].shape[dim] == tokens:
                    raise Unsupported(f"computes along tokens outside of attention ({name})")
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, Tensor):
                if tensor.shape.count(tokens) > 1:
                    raise Unsupported("computes with pairs of tokens outside of attention")
                if self._near.intersection(tensor.shape):
                    raise Unsupported("shifts tokens against each other")
        return output


def number_of_tokens(decoder: nn.Module, config: Any) -> int:
    """A number that is not near to a size of the model, nor to a multiple or part of one."""
    sizes = {size for weight in decoder.parameters() for size in weight.shape}
    sizes |= {value for value in vars(config).values() if type(value) is int}
    sizes |= {size * factor // 4 for size in sizes for factor in (1, 2, 3, 6, 8, 12)}
    return next(
        count
        for count in range(1009, 1 << 20)
        if sizes.isdisjoint(range(count - _SHIFT, count + _SHIFT + 1))
    )
