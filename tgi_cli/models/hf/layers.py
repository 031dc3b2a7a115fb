"""Our layers with the interface of transformers': [..., features] outside, [T, features] inside.

On the meta device they compute nothing but shapes, so that a model can be tried before it has
weights, whatever its quantization, and without its other shards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.layers import Build, Embedding, LMHead, Loadable, WeightSlot
from tgi_cli.layers.grouped import Groups, grouped_linear
from tgi_cli.layers.linear import (
    ColumnParallelLinear,
    Projection,
    ReplicatedLinear,
    RowParallelLinear,
)
from tgi_cli.models.hf.masks import Unsupported
from tgi_cli.models.hf.refusals import ROUTES_TOGETHER

EXPERTS = "tgi_grouped"
"""The name under which transformers' modules find :func:`_experts`."""

_WHOLE = (None, "replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")
"""Entries of tensor-parallel plans for what every shard has whole."""

_FUSED = ("qkv_proj", "query_key_value", "qkv", "c_attn", "wqkv", "w_pack", "in_proj")
"""Projections of queries, keys and values together: no plan describes their arrangement."""


class _BatchedLinear(Loadable):
    """Makes a layer for [T, in_features] accept any number of leading dimensions."""

    in_features: int
    out_features: int
    dtype: torch.dtype
    weight: nn.Parameter | None

    def finish(self) -> None:
        super().finish()
        _leave_dtype(self, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"{x.shape[-1]} inputs for a layer that has {self.in_features}")
        if x.is_meta:
            return x.new_empty(*x.shape[:-1], self.out_features)
        if x.dtype != self.dtype:  # kernels would take its bytes for the other dtype's
            raise TypeError(f"{x.dtype} for a layer in {self.dtype}")
        flat: Tensor = super().forward(x.reshape(-1, self.in_features))
        return flat.view(*x.shape[:-1], -1)


def _leave_dtype(layer: nn.Module, dtype: torch.dtype) -> None:
    """Where a layer's weight is packed, leave one of that dtype alone.

    Some code reads the dtype of a layer's weight. To compute with it is an error.
    """
    if layer._parameters.get("weight", layer) is None:
        del layer._parameters["weight"]
        layer.__dict__["weight"] = torch.empty(0, dtype=dtype, device="meta")


class _Replicated(_BatchedLinear, ReplicatedLinear):
    pass


class _Column(_BatchedLinear, ColumnParallelLinear):
    pass


class _Row(_BatchedLinear, RowParallelLinear):
    pass


class _GatheredColumn(_Column):
    """Each shard computes some outputs, and has all of them afterwards."""

    def __init__(self, build: Build, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__(build, in_features, {"": Projection(out_features)}, bias)
        self.shard = build.shard
        if out_features % build.shard.size:
            raise UnsupportedModelError(
                f"{out_features} outputs cannot be shared out evenly to {build.shard.size} shards"
            )

    def forward(self, x: Tensor) -> Tensor:
        own = super().forward(x)
        if x.is_meta:
            return x.new_empty(*x.shape[:-1], own.shape[-1] * self.shard.size)
        return self.shard.all_gather(own.flatten(0, -2)).view(*x.shape[:-1], -1)


class _SplitRow(_Row):
    """Each shard is given all inputs, and uses some."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[..., self.own])


class BatchedEmbedding(Embedding):
    """Ids [..., T] to vectors [..., T, hidden]."""

    def forward(self, ids: Tensor) -> Tensor:
        if ids.is_meta:
            return torch.empty(*ids.shape, self.shape[1], dtype=self.dtype, device="meta")
        return super().forward(ids.flatten()).view(*ids.shape, -1)


class BatchedHead(LMHead):
    """Hidden states [..., hidden] to float32 logits [..., vocab]."""

    def finish(self) -> None:
        super().finish()
        _leave_dtype(self, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return x.new_empty(*x.shape[:-1], self.vocab_size, dtype=torch.float32)
        return super().forward(x.flatten(0, -2)).view(*x.shape[:-1], -1)


class UnreplacedWeights(Loadable):
    """Weights that stay in a module of transformers, which computes with them.

    Buffers that are in ``stored`` are loaded, too. ``shares`` returns this process's part of some
    parameters; the others are whole.
    """

    def __init__(
        self,
        module: nn.Module,
        path: str,
        stored: Container[str],
        shares: Mapping[str, Callable[[Tensor], Tensor]],
    ) -> None:
        super().__init__()
        self._module = (module,)  # in a tuple: it is a submodule of the model already
        self._prefix = f"{path}." if path else ""
        self._shares = dict(shares)
        self._whole: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
        for name, buffer in module.named_buffers(recurse=False):
            if self._prefix + name in stored:
                self._whole[name] = buffer
        for name, share in self._shares.items():
            own = share(self._whole[name]).contiguous()
            setattr(module, name, nn.Parameter(own, requires_grad=False))

    def __len__(self) -> int:
        return len(self._whole)

    def slots(self, path: str) -> Iterator[WeightSlot]:
        for name, whole in self._whole.items():
            integers = not whole.is_floating_point()
            shape = tuple(whole.shape)
            yield WeightSlot(self._prefix + name, shape, self._filler(name), integers=integers)

    def _filler(self, name: str) -> Callable[[Tensor], object]:
        def fill(tensor: Tensor) -> None:
            own = self._shares[name](tensor) if name in self._shares else tensor
            getattr(self._module[0], name).data.copy_(own)

        return fill

    def materialize(self, device: torch.device) -> None:
        module = self._module[0]
        for name in self._whole:
            empty = getattr(module, name)
            real = torch.empty(empty.shape, dtype=empty.dtype, device=device)
            is_weight = isinstance(empty, nn.Parameter)
            setattr(module, name, nn.Parameter(real, requires_grad=False) if is_weight else real)


def linear(
    module: nn.Linear, path: str, style: str | None, build: Build, parent: nn.Module
) -> nn.Module:
    """Our layer for ``module``; ``style`` is its entry in the tensor-parallel plan.

    Raises:
        UnsupportedModelError: it cannot be shared out so.
    """
    sizes, bias = (module.in_features, module.out_features), module.bias is not None
    if hasattr(parent, "prepare_dynamic_mask"):  # Doge: a bias of all heads' keys on each shard
        set_shard(parent, build.shard)
    if build.shard.size == 1 or style in _WHOLE:
        return _Replicated(build, *sizes, bias)
    if style == "colwise":
        name, head_dim = path.rpartition(".")[2], getattr(parent, "head_dim", None)
        if name.lower() in _FUSED:
            raise UnsupportedModelError(
                f"{path} holds queries, keys and values together, and cannot be shared out"
            )
        units = sizes[1] // head_dim if head_dim and sizes[1] % head_dim == 0 else None
        if hasattr(parent, "expand_kv"):  # latent attention, whose head_dim is the rotated part
            units = cast(int, parent.num_heads)
        return _Column(build, sizes[0], {"": Projection(sizes[1], units)}, bias)
    if style == "rowwise":
        return _Row(build, *sizes, bias)
    if style == "colwise_gather_output":
        return _GatheredColumn(build, *sizes, bias)
    if style == "rowwise_split_input":
        return _SplitRow(build, *sizes, bias)
    raise UnsupportedModelError(f"{path} cannot be shared out to shards ({style})")


def own_part(style: str, shard: Shard, path: str) -> Callable[[Tensor], Tensor]:
    """A function from a whole parameter of an expert (or of heads) to this process's part.

    Raises:
        UnsupportedModelError: it cannot be shared out so.
    """

    def packed(tensor: Tensor) -> Tensor:
        halves = tensor.chunk(2, dim=-2)
        own = shard.share(halves[0].shape[-2])
        return torch.cat([half[..., own, :] for half in halves], dim=-2)

    def columns(tensor: Tensor) -> Tensor:
        dim = max(tensor.ndim - 2, 0)
        own = shard.share(tensor.shape[dim])
        return tensor.narrow(dim, own.start, own.stop - own.start)

    styles: dict[str, Callable[[Tensor], Tensor]] = {
        "packed_colwise": packed,
        "colwise": columns,
        "rowwise": lambda tensor: tensor[..., shard.share(tensor.shape[-1])],
    }
    if style not in styles:
        raise UnsupportedModelError(f"{path} cannot be shared out to shards ({style})")
    return styles[style]


def own_parts(
    module: nn.Module, path: str, inner_path: str, plan: Mapping[str, str], shard: Shard
) -> dict[str, Callable[[Tensor], Tensor]]:
    """By name, functions from a module's own parameters to this process's parts, where divided.

    Sets the shard of a module of experts.

    Args:
        module: at ``path`` in the whole model, and ``inner_path`` in the decoder.
        plan: transformers' plan of tensor parallelism.
        shard: this process's share of the model.

    Raises:
        UnsupportedModelError: a parameter cannot be divided as planned.
    """
    parts: dict[str, Callable[[Tensor], Tensor]] = {}
    if shard.size == 1:
        return parts
    for name, _ in module.named_parameters(recurse=False):
        style = planned(plan, f"{inner_path}.{name}")
        if style not in (None, "replicate", "replicated_with_grad_allreduce"):
            parts[name] = own_part(style, shard, f"{path}.{name}")
    if parts and planned(plan, inner_path) == "moe_tp_experts":
        set_shard(module, shard)
    return parts


def planned(plan: Mapping[str, str], path: str) -> str | None:
    """The entry of a plan for ``path``, with ``*`` for numbers."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))


def _experts(
    module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, *others: object, **more: object
) -> Tensor:
    """The weighted sum of the experts that each token chose: [T, H] to [T, H].

    ``chosen`` [T, k] and ``weights`` [T, k] come from the model's own router.
    """
    if hidden.is_meta:
        return torch.empty_like(hidden)
    plain = module.has_gate and not (module.is_transposed or module.has_post_expert_norm)
    if not plain or module.has_bias:
        output: Tensor = grouped_mm_experts_forward(module, hidden, chosen, weights)
        return _shard_of(module).all_reduce(output)
    groups = Groups.sort(chosen, len(module.gate_up_proj))
    rows = hidden.index_select(0, groups.tokens)
    inner = module._apply_gate(grouped_linear(rows, module.gate_up_proj, None, groups))
    outputs = grouped_linear(inner, module.down_proj, None, groups)
    ordered = torch.empty_like(outputs).index_copy_(0, groups.pairs, outputs)
    ordered = ordered.view(*chosen.shape, -1).mul_(weights[..., None])
    return _shard_of(module).all_reduce(ordered.sum(1).to(hidden.dtype))


def tame_routing(decoder: nn.Module) -> None:
    """Let routers and experts that look at what tokens chose be tried without numbers.

    Raises:
        Unsupported: what a token chooses depends on other tokens.
    """
    for module in decoder.modules():
        if type(module).__name__ == "JetMoeTopKGating":
            module.forward = MethodType(_dry_gating, module)
        elif type(module).__name__ in ("DbrxExperts", "Step3p7Experts"):
            module.forward = MethodType(_dry_experts, module)
        elif type(module).__name__ == "XmodOutput":
            module.lang_adapter = MethodType(_dry_adapter, module)  # type: ignore[assignment]
        elif type(module).__name__ == "DogeCDMoE":
            raise Unsupported(ROUTES_TOGETHER)
        elif type(module).__name__ == "LongcatFlashExperts":
            module.forward = MethodType(_identity_experts, module)


def _dry_gating(module: Any, hidden: Tensor) -> Any:
    if not hidden.is_meta:
        return type(module).forward(module, hidden)
    pairs = len(hidden) * module.top_k
    order = torch.empty(pairs, dtype=torch.int64, device="meta")
    counts = [pairs] + [0] * (module.num_experts - 1)
    return order, order, hidden.new_empty(pairs), counts, module.layer(hidden)


def _dry_adapter(module: Any, languages: Tensor, hidden: Tensor) -> Any:
    return hidden if hidden.is_meta else type(module).lang_adapter(module, languages, hidden)


def _dry_experts(module: Any, hidden: Tensor, *routing: Any, **more: Any) -> Any:
    if hidden.is_meta:
        return torch.empty_like(hidden)
    output: Tensor = type(module).forward(module, hidden, *routing, **more)
    return _shard_of(module).all_reduce(output)


def _identity_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """As :func:`_experts`, where the last experts return their input (LongCat)."""
    if hidden.is_meta:
        return torch.empty_like(hidden)
    routed = module.num_routed_experts
    identity = chosen >= routed
    kept, shares = chosen.masked_fill(identity, 0), weights.masked_fill(identity, 0)
    groups = Groups.sort(kept, routed)
    rows = hidden.index_select(0, groups.tokens)
    gate, up = grouped_linear(rows, module.gate_up_proj[:routed], None, groups).chunk(2, dim=-1)
    outputs = grouped_linear(module.act_fn(gate) * up, module.down_proj, None, groups)
    ordered = torch.empty_like(outputs).index_copy_(0, groups.pairs, outputs)
    ordered = ordered.view(*chosen.shape, -1).mul_(shares[..., None])
    summed = _shard_of(module).all_reduce(ordered.sum(1).to(hidden.dtype))
    own = weights.masked_fill(~identity, 0).sum(-1, keepdim=True)
    return summed.add_((hidden * own).to(hidden.dtype))


def set_shard(module: nn.Module, shard: Shard) -> None:
    """Tell a module which shard it is on; experts' results are summed up over shards."""
    module.tgi_shard = shard  # type: ignore[assignment]  # any object may be an attribute


def _shard_of(module: nn.Module) -> Shard:
    return cast(Shard, getattr(module, "tgi_shard", ALONE))


ExpertsInterface.register(EXPERTS, _experts)
