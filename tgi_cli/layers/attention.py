"""The attention block: project, rotate, attend over the paged cache, project back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from tgi_cli.attention import KVSpec, PagedAttention
from tgi_cli.layers import ops
from tgi_cli.layers.base import Build, Loadable, WeightSlot, empty_parameter
from tgi_cli.layers.linear import ColumnParallelLinear, Projection, RowParallelLinear
from tgi_cli.layers.norm import QKNorm, WideRMSNorm

Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines of a step's positions, [T, 1, rotated dimensions] each."""


class Sinks(Loadable):
    """A logit per head that takes part in every softmax and has no value (gpt-oss)."""

    def __init__(self, build: Build, num_heads: int) -> None:
        super().__init__()
        self.own = build.shard.share(num_heads)
        self.num_heads = num_heads
        self.weight = empty_parameter(self.own.stop - self.own.start, dtype=build.dtype)

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield self.slot(path, "weight", (self.num_heads,), self.own)


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention: hidden [T, H] -> [T, H].

    Args:
        build: dtype, quantization, shard.
        layer: index of its KV cache.
        hidden_size: H.
        num_heads, num_kv_heads: over all shards; each shard has its share of the heads, and
            several have the same KV head if there are fewer heads than shards.
        head_dim: of queries, keys and values.
        bias: on the projections of queries, keys and values.
        output_bias: on that of the output.
        scale: of the scores. Default: 1 / sqrt(head_dim).
        window: number of positions that a query sees, its own included. Default: all.
        softcap: of the scores; see :class:`~tgi_cli.attention.PagedAttention`.
        sinks: whether heads have one.
        qk_norm_eps: of the RMS norms of queries and keys before they are rotated. Default: there
            are no such norms.
        qk_norm: whether these run over each head (``one_plus``: with the factor 1 + weight) or
            over all heads together (``wide``).
        output_gate: whether what a head attended to is multiplied by sigmoid(gate), a projection of
            the input (https://arxiv.org/abs/2505.06708).
        head_gate: the same with one number per head.
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
        qk_norm: Literal["heads", "one_plus", "wide"] = "heads",
        output_gate: bool = False,
        head_gate: bool = False,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.softcap = softcap
        self.output_gate = output_gate
        parts = {
            "q_proj": Projection(num_heads * head_dim, num_heads),
            "k_proj": Projection(num_kv_heads * head_dim, num_kv_heads),
            "v_proj": Projection(num_kv_heads * head_dim, num_kv_heads),
        }
        if output_gate:
            parts["gate_proj"] = Projection(num_heads * head_dim, num_heads)
        self.qkv_proj = ColumnParallelLinear(build, hidden_size, parts, bias)
        # Of queries, keys, values, and the gate.
        self.heads = [(own.stop - own.start) // head_dim for _, own in self.qkv_proj.parts.values()]
        self.o_proj = RowParallelLinear(
            build, num_heads * head_dim, hidden_size, output_bias, units=num_heads
        )
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
            one_plus = qk_norm == "one_plus"
            self.qk_norm = QKNorm(
                build, self.heads[0], self.heads[1], head_dim, qk_norm_eps, one_plus
            )
        self.kv_spec = KVSpec(self.heads[1], head_dim, window)

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, attention: PagedAttention
    ) -> Tensor:
        """``rotation`` is None if positions are not rotated."""
        qkv = self.qkv_proj(hidden).view(hidden.shape[0], -1, self.head_dim)
        query, key, value, *gate = qkv.split(self.heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query.copy_(self.q_norm(query.flatten(1)).view(query.shape))
            key.copy_(self.k_norm(key.flatten(1)).view(key.shape))
        sinks = None if self.sinks is None else self.sinks.weight
        slots = attention.step_slots
        if slots is not None and rotation is not None and (kernels := ops.triton_kernels()):
            norm = self.qk_norm
            kernels.norm_rotate_write(
                qkv[:, : sum(self.heads[:3])],
                None if norm is None else norm.weight,
                0.0 if norm is None else norm.eps,
                *rotation,
                attention.key_cache[self.layer],
                attention.value_cache[self.layer],
                slots,
            )
            attended = attention.attend(self.layer, query, self.scale, self.softcap, sinks)
            return self._project(attended, gate, hidden)
        rotated = qkv[:, : self.heads[0] + self.heads[1]]
        if self.qk_norm is not None:
            self.qk_norm(rotated, rotation)
        elif rotation is not None:
            ops.rotate_(rotated, *rotation)
        attended = attention(self.layer, query, key, value, self.scale, self.softcap, sinks)
        return self._project(attended, gate, hidden)

    def _project(self, attended: Tensor, gate: list[Tensor], hidden: Tensor) -> Tensor:
        if gate:
            attended = ops.gate(attended, gate[0], "sigmoid")
        if self.head_gate is not None:
            # In float64, since a CPU rounds a float32's sigmoid by its position in a tensor.
            factors = self.head_gate(hidden).double().sigmoid_().to(attended.dtype)
            attended = attended * factors[..., None]
        output: Tensor = self.o_proj(attended.flatten(1))
        return output
