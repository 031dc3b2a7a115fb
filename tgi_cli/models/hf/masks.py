"""Masks of transformers' models: in a dry run they are described instead of made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

_FAR = 1 << 18
"""A position beyond the length of any window in use."""

READS_MASK = "looks into the mask"


class Unsupported(Exception):
    """The reason for which a model cannot be run; completes "it ..."."""


@dataclass(frozen=True, slots=True)
class WindowMask:
    """Replaces a causal mask; ``window`` and ``chunk`` as in :class:`tgi_cli.attention.KVSpec`."""

    window: int | None
    chunk: int | None = None
    shape: tuple[int, ...] = field(default=(), compare=False)
    """That the mask would have."""

    def size(self) -> tuple[int, ...]:
        """See ``shape``."""
        return self.shape

    @property
    def dtype(self) -> torch.dtype:
        """That the mask would have."""
        return torch.bool

    def to(self, *_: object) -> WindowMask:
        """Itself, whatever its dtype."""
        return self

    def __getattr__(self, name: str) -> Any:
        raise Unsupported(READS_MASK)

    def __getitem__(self, _: object) -> WindowMask:
        return self  # where no mask is given, a model that uses the part will fail


@dataclass(frozen=True, slots=True)
class UnusableMask:
    """Replaces a mask that attention cannot have; to use it is refused for ``reason``."""

    reason: str

    def __getattr__(self, name: str) -> Any:
        raise Unsupported(self.reason)


def unmasked(**mask: Any) -> WindowMask:
    """Replaces a mask where it is known already."""
    return WindowMask(None, shape=(mask["batch_size"], 1, mask["q_length"], mask["kv_length"]))


def describe_mask(**mask: Any) -> WindowMask | UnusableMask:
    """Replaces a mask in a dry run."""
    sizes = (mask["batch_size"], 1, mask["q_length"], mask["kv_length"])
    try:
        return replace(_describe(**mask), shape=sizes)
    except Unsupported as reason:
        return UnusableMask(str(reason))  # of cross-attention, which is not computed


def _describe(*, mask_function: Callable[..., Any], **_: object) -> WindowMask:
    """What of a text a mask shows, found by evaluating it for a few queries."""

    def first_seen(query: int) -> int:
        keys, zero = torch.arange(query + 2), torch.tensor(0)
        try:
            seen = torch.as_tensor(mask_function(zero, zero, torch.tensor(query), keys))
            seen = seen.expand(len(keys)).bool()
        except (RuntimeError, IndexError) as error:
            raise Unsupported(
                f"has a mask that depends on more than positions ({error})"
            ) from error
        first = len(keys) - 1 - int(seen.sum())
        if seen[-1] or not seen[first:-1].all():
            raise Unsupported("has a mask that is neither causal nor a sliding window")
        return first

    queries = (_FAR, _FAR + _FAR // 7, _FAR + _FAR // 3)
    seen = [first_seen(query) for query in queries]
    if not any(seen):
        return WindowMask(None)
    widths = {query - first + 1 for query, first in zip(queries, seen, strict=True)}
    if len(widths) == 1:
        return WindowMask(widths.pop())
    if seen[0]:
        chunk = seen[0] - first_seen(seen[0] - 1)
        tried = (*queries, seen[1], seen[1] + chunk - 1, seen[2] - 1, chunk, chunk - 1)
        if all(first_seen(query) == query // chunk * chunk for query in tried):
            return WindowMask(None, chunk)
    raise Unsupported("has a mask that is neither causal nor a sliding window")
