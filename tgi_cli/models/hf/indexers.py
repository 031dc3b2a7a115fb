"""Sparse attention of transformers' models: their indexers over our caches.

Modules with an indexer (DeepSeek V3.2's, https://arxiv.org/abs/2512.02556, and MiniMax M3's by
blocks) attend to the best so many tokens of a text. Indexers run with their own code up to the
point where they would search all keys of a text: DeepSeek's is given stand-ins for keys and mask,
which record what is done to them through torch's protocol for other types
(https://docs.pytorch.org/docs/stable/notes/extending.html#extending-torch-python-api). The search
is :mod:`tgi_cli.attention.sparse`'s. An operation that is not known is refused.

Where no text that is served is longer than what is chosen, indexers are left out.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from tgi_cli.attention.sparse import BlockRule, ChosenRows, choose_blocks, choose_tokens
from tgi_cli.models.hf import pooled_indexers
from tgi_cli.models.hf.arguments import cache_names, parameters_of
from tgi_cli.models.hf.masks import Unsupported, WindowMask

_UNLIMITED = 1 << 62
"""How many scores a stand-in says that it has: what is chosen of them is at most the rest."""

_OWN_MASK = "has an indexer with a mask of its own making"


class EveryToken:
    """What an indexer that is left out chooses, and the mask of models with indexers."""

    dtype = torch.bool

    def __getitem__(self, _: object) -> EveryToken:
        return self

    def __and__(self, mask: Any) -> Any:
        return mask

    __rand__ = __and__

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Unsupported("computes with what its indexer chooses")


EVERY_TOKEN = EveryToken()


class _LeftOut(nn.Module):
    def forward(self, *_: object, **__: object) -> EveryToken:
        return EVERY_TOKEN


@dataclass(frozen=True, slots=True)
class Chosen:
    """What an indexer has chosen, as it is handed to attention.

    Attributes:
        choice: of a step; None if every query attends to all that it sees, and in a dry run.
        heads: each of which chose for itself.
    """

    choice: ChosenRows | None
    heads: int = 1

    @property
    def indices(self) -> Chosen:
        """Itself, as the indices among the results of a search."""
        return self

    def to(self, *_: object) -> Chosen:
        """Itself, whatever the dtype of indices."""
        return self

    def __rand__(self, mask: object) -> Chosen:
        """Itself, beside the mask of a dry run."""
        if mask != WindowMask(None):
            raise Unsupported(_OWN_MASK)
        return self


def dense_positions(decoder: nn.Module) -> int | None:
    """Length of the longest text of which all tokens are chosen; None without indexers."""
    return min((limit for _, _, limit in _indexers(decoder)), default=None)


def can_search(decoder: nn.Module) -> bool:
    """Whether all indexers of a model are of a kind that :func:`keep` knows."""
    return all(_is_known(module.indexer) for _, module, _ in _indexers(decoder))


def leave_out(decoder: nn.Module) -> list[str]:
    """Let the modules of a model attend to all tokens of a text; returns paths of what went."""
    removed = []
    for path, module, _ in list(_indexers(decoder)):
        module.indexer = _LeftOut()
        removed.append(f"{path}.indexer")
    for module in decoder.modules():
        if hasattr(module, "build_attention_mask_from_topk"):
            cast(Any, module).build_attention_mask_from_topk = _every_token
    return removed


def keep(decoder: nn.Module) -> None:
    """Let the indexers of a model search the caches of index keys."""
    rotary = getattr(decoder, "rotary_emb", None)
    for _, module, _ in list(_indexers(decoder)):
        indexer: Any = module.indexer
        if pooled_indexers.is_pooled(indexer):
            indexer.forward = _handed_on(pooled_indexers.chooser(indexer, rotary))
        elif hasattr(indexer, "topk_blocks"):
            indexer.forward = MethodType(_choose_blocks, indexer)
        else:
            indexer.forward = _with_stand_ins(indexer)
    for module in decoder.modules():
        if hasattr(module, "build_attention_mask_from_topk"):
            cast(Any, module).build_attention_mask_from_topk = _chosen_instead


def _indexers(decoder: nn.Module) -> Iterator[tuple[str, Any, int]]:
    """Paths of modules with an indexer, the modules, and how many tokens these choose."""
    for path, module in decoder.named_modules():
        indexer: Any = getattr(module, "indexer", None)
        if not getattr(indexer, "index_kpool_always_select_tail", True):
            raise Unsupported("may not attend to the last tokens of a text")
        if hasattr(indexer, "index_topk"):
            yield path, module, int(indexer.index_topk)
        elif hasattr(indexer, "topk_blocks"):
            yield path, module, int(indexer.topk_blocks * indexer.block_size)
        elif hasattr(indexer, "token_budget"):
            yield path, module, int(indexer.token_budget)


def _is_known(indexer: Any) -> bool:
    """Whether an indexer scores single tokens, blocks of them, or means of a kind that is known."""
    if hasattr(indexer, "topk_blocks") or pooled_indexers.is_pooled(indexer):
        return True
    masked = "attention_mask" in parameters_of(indexer.forward)
    return hasattr(indexer, "index_topk") and masked and len(cache_names(indexer.forward)) == 1


def _every_token(*_: object, **__: object) -> EveryToken:
    return EVERY_TOKEN


def _chosen_instead(topk_indices: Chosen, **_: object) -> Chosen:
    """What attention is given as a mask."""
    return topk_indices


def _handed_on(choose: Callable[..., ChosenRows | None]) -> Callable[..., Chosen]:
    return lambda *args, **kwargs: Chosen(choose(*args, **kwargs))


def _choose_blocks(
    indexer: Any, hidden: Tensor, position_embeddings: Any, _: object, __: object
) -> Chosen:
    """MiniMax M3's indexer, of hidden states [1, T, H]."""
    shape = (1, hidden.shape[1], -1, indexer.head_dim)
    query = indexer.q_norm(indexer.q_proj(hidden).view(shape)).transpose(1, 2)
    key = indexer.k_norm(indexer.k_proj(hidden).view(shape)).transpose(1, 2)
    cos, sin = (each[..., : indexer.head_dim] for each in position_embeddings)
    query, key = sys.modules[type(indexer).__module__].apply_rotary_pos_emb(query, key, cos, sin)
    context = indexer.tgi_attention
    layer = context.index_cache(indexer, key)
    if key.is_meta:
        return Chosen(None, indexer.num_heads)
    rule = BlockRule(indexer.block_size, indexer.topk_blocks, indexer.local_blocks)
    choice = choose_blocks(context.step, layer, query[0].transpose(0, 1), key[0, 0], rule)
    return Chosen(choice, indexer.num_heads)


def _with_stand_ins(indexer: Any) -> Callable[..., Any]:
    """The indexer's forward, with a stand-in for its cache and its mask."""
    own = indexer.forward
    signature = inspect.signature(own)
    (cache_name,) = cache_names(own)

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        mask = given.arguments.get("attention_mask")
        if mask is not EVERY_TOKEN and mask != WindowMask(None):
            raise Unsupported(_OWN_MASK)
        given.arguments |= {"attention_mask": _CAUSAL, cache_name: _IndexCache(indexer)}
        chosen = own(*given.args, **given.kwargs)
        if not isinstance(chosen, Chosen):
            raise Unsupported("has an indexer of another kind")
        return chosen

    return forward


class _Causal:
    """A mask that is added to scores, and hides what is after a query."""

    dtype = torch.float32


_CAUSAL = _Causal()


@dataclass(frozen=True, slots=True)
class _IndexCache:
    """What an indexer takes for transformers' cache."""

    indexer: Any

    def update_indexer(self, key: Tensor, *_: object) -> _Keys:
        """A stand-in for all keys of a text, of those of the step [1, T, dim]."""
        shadow = torch.empty(key.shape, dtype=key.dtype, device="meta")
        return _Keys(self.indexer, key, shadow)


def _other_way(what: str) -> Unsupported:
    return Unsupported(f"has an indexer that computes in a way of its own ({what})")


@dataclass(frozen=True, slots=True, eq=False)
class _Keys:
    """Index keys of a text.

    Attributes:
        indexer: whose they are.
        key: those of the step, [1, T, dim].
        shadow: a tensor on the meta device, which shows how the code has arranged them.
    """

    indexer: Any
    key: Tensor
    shadow: Tensor

    def __getattr__(self, name: str) -> Any:
        if name not in ("float", "transpose", "unsqueeze"):
            raise _other_way(f"{name} of keys")

        def rearranged(*args: Any) -> _Keys:
            return replace(self, shadow=getattr(self.shadow, name)(*args))

        return rearranged

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name != "matmul" or len(args) != 2 or not isinstance(args[1], cls):
            raise _other_way(f"{name} of keys")
        query, keys = args
        tokens, dim = keys.key.shape[1:]
        shapes = (keys.shadow.shape, query.shape[:2], query.shape[3:])
        if shapes != ((1, 1, dim, tokens), (1, tokens), (dim,)):
            raise _other_way("tensors of another layout")
        return _Scores(keys, query)


@dataclass(frozen=True, slots=True, eq=False)
class _Scores:
    """The scores of all keys of a text, as far as an indexer's code has computed them.

    Attributes:
        keys: of the text.
        query: [1, T, heads, dim].
        scale: their factor so far.
        cut: whether negative ones were set to zero.
        weights: [1, T, heads], by which heads were added up.
        masked: whether those after a query are hidden.
    """

    keys: _Keys
    query: Tensor
    scale: float = 1.0
    cut: bool = False
    weights: Tensor | None = None
    masked: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """For its last dimension alone."""
        return (_UNLIMITED,)

    def __getattr__(self, name: str) -> Any:
        if name == "squeeze" and self.weights is not None:
            return lambda dim: self
        raise _other_way(f"{name} of scores")

    def __mul__(self, factor: Any) -> _Scores:
        if not isinstance(factor, float | int) or factor <= 0:
            raise _other_way("a factor of scores")
        return replace(self, scale=self.scale * factor)

    def __add__(self, mask: object) -> _Scores:
        if mask is not _CAUSAL or self.weights is None:
            raise _other_way("a sum of scores")
        return replace(self, masked=True)

    def topk(self, count: int, dim: int = -1) -> Chosen:
        """Search the keys of the step's sequences."""
        if dim != -1 or not (self.cut and self.masked) or self.weights is None:
            raise _other_way("a choice of scores")
        indexer, key = self.keys.indexer, self.keys.key
        context = indexer.tgi_attention
        layer = context.index_cache(indexer, key)
        if key.is_meta:
            return Chosen(None)
        weights = self.weights[0].float() * self.scale
        return Chosen(choose_tokens(context.step, layer, self.query[0], key[0], weights, count))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name == "relu" and isinstance(args[0], cls):
            return replace(args[0], cut=True)
        if name == "matmul" and len(args) == 2 and isinstance(args[1], cls):
            weights, scores = args
            tokens, heads = scores.query.shape[1:3]
            if scores.cut and scores.weights is None and weights.shape == (1, tokens, 1, heads):
                return replace(scores, weights=weights[:, :, 0])
        raise _other_way(f"{name} of scores")
