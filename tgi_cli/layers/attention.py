"""The attention block: project, rotate, attend over the paged cache, project back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from tgi_cli.attention import KVSpec, PagedAttention, Spans
from tgi_cli.layers import ops
from tgi_cli.layers.base import Build, Loadable, WeightSlot, empty_parameter
from tgi_cli.layers.linear import ColumnParallelLinear, Projection, RowParallelLinear
from tgi_cli.layers.norm import QKNorm, WideRMSNorm

Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines of a step's positions, [T, 1, rotated dimensions] each."""

ByPosition = Rotation | Tensor
"""The rotation of queries and keys, or a factor of queries, [T, 1, 1]."""


class Sinks(Loadable):
    """A logit per head that takes part in every softmax and has no value (gpt-oss)."""

    def __init__(self, build: Build, num_heads: int) -> None:
        super().__init__()
        self.own = build.shard.share(num_heads)
        self.num_heads = num_heads
        self.weight = empty_parameter(self.own.stop - self.own.start, dtype=build.dtype)

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield self.slot(path, "weight", (self.num_heads,), self.own)


class Slopes(Loadable):
    """ALiBi's slope of each head (https://arxiv.org/abs/2108.12409), as attention's bias."""

    def __init__(self, build: Build, slopes: Sequence[float]) -> None:
        super().__init__()
        self.slopes = tuple(slopes)[build.shard.share(len(slopes))]
        self.weight = empty_parameter(len(self.slopes), 2, dtype=torch.float32)

    def slots(self, path: str) -> Iterator[WeightSlot]:
        return iter(())

    def finish(self) -> None:
        self.weight.copy_(torch.tensor([(0.0, -slope) for slope in self.slopes]))


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention: hidden [T, H] -> [T, H].

    Args:
        build: dtype, quantization, shard.
        layer: index of its KV cache.
        hidden_size: H.
        num_heads, num_kv_heads: over all shards; each shard has its share of the heads, and
            several share a KV head if there are fewer KV heads than shards.
        head_dim: width of queries and keys.
        bias: whether the projections of queries, keys and values have biases.
        output_bias: whether the output projection has a bias.
        scale: factor of the scores. Default: 1 / sqrt(head_dim).
        window: number of positions that a query sees, its own included. Default: all.
        softcap: soft cap of the scores; see :class:`~tgi_cli.attention.PagedAttention`.
        sinks: whether heads have sinks.
        qk_norm_eps: of the RMS norms of queries and keys before they are rotated. Default: there
            are no such norms.
        qk_norm: whether these run over each head (``one_plus``: with the factor 1 + weight;
            ``unit``: without a weight) or over all heads together (``wide``).
        output_gate: whether the output of each head is multiplied by sigmoid(gate), gate being a
            projection of the input (https://arxiv.org/abs/2505.06708).
        head_gate: as ``output_gate``, with one number per head.
        value_dim: width of values. Default: ``head_dim``.
        value_norm: whether each value has an RMS norm without a weight.
        values_from_keys: whether values are the keys before their norm.
        chunk: positions of a chunk; a query sees its own chunk only. Default: all.
        slopes: ALiBi's slope of each head, over all shards. Default: none.
        spans: how tokens of a bidirectional span attend to it; see
            :class:`~tgi_cli.attention.KVSpec`.
        shared: whether ``layer`` is an earlier layer's cache, which is not written.
    """

    def __init__(
        self,
        build: Build,
        layer: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        output_bias: bool = False,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        qk_norm_eps: float | None = None,
        qk_norm: Literal["heads", "one_plus", "wide", "unit"] = "heads",
        output_gate: bool = False,
        head_gate: bool = False,
        value_dim: int | None = None,
        value_norm: bool = False,
        values_from_keys: bool = False,
        chunk: int | None = None,
        slopes: Sequence[float] = (),
        spans: Spans = "none",
        shared: bool = False,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.softcap = softcap
        self.output_gate = output_gate
        self.shared = shared
        self.values_from_keys = values_from_keys
        self.value_dim = head_dim if value_dim is None else value_dim
        parts = {"q_proj": Projection(num_heads * head_dim, num_heads)}
        if not shared:
            parts["k_proj"] = Projection(num_kv_heads * head_dim, num_kv_heads)
        if not shared and not values_from_keys:
            parts["v_proj"] = Projection(num_kv_heads * self.value_dim, num_kv_heads)
        if output_gate:
            parts["gate_proj"] = Projection(num_heads * self.value_dim, num_heads)
        self.qkv_proj = ColumnParallelLinear(build, hidden_size, parts, bias)
        self.widths = [own.stop - own.start for _, own in self.qkv_proj.parts.values()]
        self.all_heads = [width // head_dim for width in self.widths]
        self.heads = [self.all_heads[0], 0 if shared else self.all_heads[1]]
        """Numbers of query heads and of key heads."""
        self.plain = not (shared or values_from_keys or value_norm) and value_dim is None
        """Whether keys and values are plain projections, all heads having one width."""
        self.o_proj = RowParallelLinear(
            build, num_heads * self.value_dim, hidden_size, output_bias, units=num_heads
        )
        self.slopes = Slopes(build, slopes) if slopes else None
        self.v_norm: QKNorm | None = None
        if value_norm and not shared:
            eps = qk_norm_eps or 0.0
            self.v_norm = QKNorm(build, self.all_heads[1], 0, self.value_dim, eps, unit=True)
        self.head_gate: ColumnParallelLinear | None = None
        if head_gate:
            one_each = {"": Projection(num_heads)}
            self.head_gate = ColumnParallelLinear(build, hidden_size, one_each, bias=False)
        self.sinks = Sinks(build, num_heads) if sinks else None
        self.qk_norm: QKNorm | None = None
        self.q_norm: WideRMSNorm | None = None
        self.k_norm: WideRMSNorm | None = None
        if qk_norm_eps is not None and qk_norm == "wide":
            self.q_norm = WideRMSNorm(build, num_heads * head_dim, num_heads, qk_norm_eps)
            self.k_norm = WideRMSNorm(build, num_kv_heads * head_dim, num_kv_heads, qk_norm_eps)
        elif qk_norm_eps is not None:
            self.qk_norm = QKNorm(
                build,
                self.heads[0],
                self.heads[1],
                head_dim,
                qk_norm_eps,
                one_plus=qk_norm == "one_plus",
                unit=qk_norm == "unit",
            )
        self.kv_spec = KVSpec(self.heads[1], head_dim, window, value_dim, chunk, spans=spans)

    def forward(
        self, hidden: Tensor, rotation: ByPosition | None, attention: PagedAttention
    ) -> Tensor:
        """``rotation`` is None if nothing is done to queries and keys by position."""
        projected = self.qkv_proj(hidden)
        rotated, query, key, value, gate = self._parts(projected)
        if self.q_norm is not None and self.k_norm is not None and key is not None:
            query.copy_(self.q_norm(query.flatten(1)).view(query.shape))
            key.copy_(self.k_norm(key.flatten(1)).view(key.shape))
        sinks = None if self.sinks is None else self.sinks.weight
        bias = None if self.slopes is None else self.slopes.weight
        slots = attention.step_slots
        if (
            slots is not None
            and self.plain
            and isinstance(rotation, tuple)
            and (kernels := ops.triton_kernels())
        ):
            norm = self.qk_norm
            written = projected[:, : sum(self.widths[:3])]
            kernels.norm_rotate_write(
                written.view(written.shape[0], -1, self.head_dim),
                None if norm is None else norm.weight,
                0.0 if norm is None else norm.eps,
                *rotation,
                attention.key_cache[self.layer],
                attention.value_cache[self.layer],
                slots,
                attention.write_factors(self.layer),
            )
            attended = attention.attend(self.layer, query, self.scale, self.softcap, sinks, bias)
            return self._project(attended, gate, hidden)
        if self.qk_norm is not None:
            self.qk_norm(rotated, rotation if isinstance(rotation, tuple) else None)
        elif isinstance(rotation, tuple):
            ops.rotate_(rotated, *rotation)
        if isinstance(rotation, Tensor):
            query.copy_(query * rotation)
        attended = attention(self.layer, query, key, value, self.scale, self.softcap, sinks, bias)
        return self._project(attended, gate, hidden)

    def _parts(
        self, projected: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Queries and keys as one, queries, keys, values [T, heads, dimensions], and the gate."""
        if self.plain:
            heads = projected.view(projected.shape[0], -1, self.head_dim)
            query, key, value, *others = torch.split(heads, self.all_heads, dim=1)
            rotated = heads[:, : self.heads[0] + self.heads[1]]
            return rotated, query, key, value, others[0] if others else None
        rotated = projected[:, : sum(self.heads) * self.head_dim]
        rotated = rotated.view(projected.shape[0], -1, self.head_dim)
        parts: tuple[Tensor, ...] = torch.split(projected, self.widths, dim=1)
        gate = parts[-1] if self.output_gate else None
        if self.shared:
            return rotated, rotated, None, None, gate
        query, key = torch.split(rotated, self.heads, dim=1)
        if self.values_from_keys:
            value = key.clone()
        else:
            value = parts[2].view(len(projected), -1, self.value_dim)
        if self.v_norm is not None:
            self.v_norm(value, None)
        return rotated, query, key, value, gate

    def _project(self, attended: Tensor, gate: Tensor | None, hidden: Tensor) -> Tensor:
        if gate is not None:
            attended = ops.gate(attended, gate.view(attended.shape), "sigmoid")
        if self.head_gate is not None:
            attended = ops.gate(attended, self.head_gate(hidden)[..., None], "sigmoid")
        output: Tensor = self.o_proj(attended.flatten(1))
        return output
