"""What a cache keeps of each token, per layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Spans = Literal["none", "window", "whole"]
"""What tokens of a bidirectional span (:attr:`AttentionMetadata.visible_until`) see of it: ``none``
of what is after them, all that is, from where their window begins, or the ``whole`` span."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one cache keeps of a token, a key and a value per KV head, and which queries see it.

    Raises:
        ValueError: it has both a window and chunks, or values that are wider than the keys that
            they are part of.
    """

    num_kv_heads: int
    head_dim: int
    """Width of a key."""
    window: int | None = None
    """Number of positions that a query sees, its own included (transformers' ``sliding_window``).
    Default: all before it."""
    value_dim: int | None = None
    """Width of a value. Default: ``head_dim``."""
    chunk: int | None = None
    """A query at position p sees no position before p // chunk * chunk (Llama 4)."""
    values_in_keys: bool = False
    """Values are the first ``value_dim`` dimensions of the keys, and are not stored again."""
    gathered: bool = False
    """The layer computes attention itself, of what :meth:`PagedAttention.gather` returns."""
    index: bool = False
    """Keys are those of an indexer, which chooses what other layers attend to
    (:mod:`tgi_cli.attention.sparse`); nothing attends to them."""
    spans: Spans = "none"
    """How queries see bidirectional spans. Those that are seen ``whole`` begin their sequences."""

    def __post_init__(self) -> None:
        if self.window is not None and self.chunk is not None:
            raise ValueError("a layer has a window or chunks, not both")
        if self.values_in_keys and self.value_width > self.head_dim:
            raise ValueError(f"{self.value_dim} of {self.head_dim} dimensions cannot be values")

    @property
    def value_width(self) -> int:
        """Dimensions of a value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def numbers(self) -> int:
        """How many numbers are stored per token."""
        return self.num_kv_heads * (self.head_dim + (not self.values_in_keys) * self.value_width)

    @property
    def reach(self) -> int | None:
        """The most positions that a query sees, or None if there is no limit."""
        return self.window or self.chunk

    def first_visible(self, position: int) -> int:
        """The first position that a query at ``position`` sees."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return 0 if self.chunk is None else position // self.chunk * self.chunk

    def visible(self, position: int, until: int = -1) -> range:
        """The positions that a query at ``position`` sees.

        ``until`` is its entry of :attr:`AttentionMetadata.visible_until`.
        """
        first, last = self.first_visible(position), position
        if until >= 0 and self.spans != "none":
            first, last = 0 if self.spans == "whole" else first, max(position, until)
        return range(first, last + 1)


class KVScales(NamedTuple):
    """What a cache of 8-bit floats is to be multiplied by, one number per layer."""

    key: float = 1.0
    value: float = 1.0
