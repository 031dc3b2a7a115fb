"""The experts of a mixture: feed-forward blocks of which each token passes a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tgi_cli.device.distributed import Shard
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.kernels.experts import PackedBlock, PackedExperts
from tgi_cli.kernels.linear import ACTIVATIONS, Epilogue
from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.layers import ops
from tgi_cli.layers.base import Build, Loadable
from tgi_cli.layers.grouped import Groups, can_fuse, expert_linear, grouped_linear
from tgi_cli.layers.linear import ColumnParallelLinear, Projection, RowParallelLinear
from tgi_cli.quantization import Unquantized
from tgi_cli.quantization.cuda_matmul import TritonMatmul
from tgi_cli.quantization.tiled_weight import ExpertRows, TiledWeight, stack_weights

CLAMPED_SWIGLU = "clamped_swiglu"
"""The activation of gpt-oss, see :func:`clamped_swiglu`."""


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """gate * sigmoid(1.702 gate) * (up + 1) of [T, 2 I], gate first: [T, I].

    Gates are cut at 7 above, ups at 7 on both sides.
    https://huggingface.co/docs/transformers/main/en/model_doc/gpt_oss
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return torch.sigmoid(gate * 1.702).mul_(gate).mul_(up.add_(1.0))


class _Stackable(Loadable):
    """A layer whose memory may be part of a stack of layers."""

    allocate: Callable[[torch.device], None] | None = None
    """Gives the parameters memory, or leaves it to the layer."""
    finished: Callable[[], None] | None = None
    """Called when the layer is loaded."""

    def materialize(self, device: torch.device) -> None:
        if self.allocate is not None:
            self.allocate(device)
        if any(parameter.is_meta for parameter in self.parameters(recurse=False)):
            super().materialize(device)

    def finish(self) -> None:
        super().finish()
        if self.finished is not None:
            self.finished()


class _GateUp(_Stackable, ColumnParallelLinear):
    pass


class _Down(_Stackable, RowParallelLinear):
    pass


class Expert(nn.Module):
    """One feed-forward block: [n, H] to this shard's summand of [n, H]."""

    def __init__(
        self, build: Build, hidden_size: int, size: int, bias: bool, activation: str, gated: bool
    ) -> None:
        super().__init__()
        parts = {"gate_proj": Projection(size)} if gated else {}
        parts["up_proj"] = Projection(size)
        self.activation = activation
        self.gated = gated
        self.gate_up_proj = _GateUp(build, hidden_size, parts, bias)
        self.down_proj = _Down(build, size, hidden_size, bias)
        self.gate_up_proj.paired = gated and activation in ACTIVATIONS
        leave_sum(self.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.inner(self.gate_up_proj(x)))
        return output

    def inner(self, gate_up: Tensor) -> Tensor:
        """The input of the down projection, from the outputs of gate and up."""
        if not self.gated:
            return ops.activate(gate_up, self.activation)
        if self.activation == CLAMPED_SWIGLU:
            if gate_up.is_cuda and (kernels := ops.triton_kernels()):
                product: Tensor = kernels.clamped_swiglu(gate_up)
                return product
            return clamped_swiglu(gate_up)
        return ops.gated(gate_up, self.activation)


class Experts(nn.Module):
    """All experts of a layer, each with the weights of a layer of its own.

    On a CPU whose kernels are compiled, one call computes all experts that have tokens; without
    them, experts are computed one by one. Elsewhere weights, dense or quantized, are in one stack
    per projection, of which the experts' own are views, and are multiplied in groups.

    Milliseconds of one core, bf16, of a layer of Qwen3-30B-A3B (128 experts, 8 per token, H 2048,
    I 768), gpt-oss-20b (32, 4, H and I 2880) and a small Mixtral (8, 2, H 1024, I 3584), by
    ``python -m tests.benchmarks.moe``; weights are read at some 10 GB/s in all but the last column:

    =======================  ======  ======  ======  ======
    tokens                        1       8      32     512
    =======================  ======  ======  ======  ======
    Qwen3, one by one           8.5      50     113     304
    Qwen3, torch grouped_mm    12.8      72     143     374
    gpt-oss, one by one          20      94     132     579
    gpt-oss, grouped_mm          27     126     193     681
    Mixtral, one by one         4.3      17      20     129
    Mixtral, grouped_mm         5.4      19      27     136
    =======================  ======  ======  ======  ======
    """

    def __init__(
        self,
        build: Build,
        num_experts: int,
        hidden_size: int,
        size: int,
        bias: bool,
        activation: str,
        gated: bool = True,
        scale_inputs: bool = False,
    ) -> None:
        super().__init__()
        self.scale_inputs = scale_inputs
        # No published adapter targets single experts.
        build = replace(build, lora=None, quantization=build.quantization.experts)
        self.dense = isinstance(build.quantization, Unquantized)
        self.every = [
            Expert(build, hidden_size, size, bias, activation, gated) for _ in range(num_experts)
        ]
        for index, expert in enumerate(self.every):
            self.add_module(str(index), expert)
            for layer in (expert.gate_up_proj, expert.down_proj):
                layer.allocate, layer.finished = self._allocate, self._count_finished
        self._unfinished = 2 * num_experts
        self.gate_up: Stack | None = None
        self.down: Stack | None = None
        self.packed: PackedExperts | None = None

    def _allocate(self, device: torch.device) -> None:
        """Give all experts memory when the first one needs it."""
        if self.dense and device.type != "cpu" and self.gate_up is None:
            self.stack(device)

    def _count_finished(self) -> None:
        """Stack what a quantization method has made of the weights, once all are loaded."""
        self._unfinished -= 1
        if self._unfinished or self.gate_up is not None:
            return
        if self._stays_apart():
            self.packed = self._pack()
        else:
            self.gate_up = Stack.of_loaded([expert.gate_up_proj for expert in self.every])
            self.down = Stack.of_loaded([expert.down_proj for expert in self.every])

    def _stays_apart(self) -> bool:
        weights = [expert.down_proj.weight for expert in self.every]
        packed = [expert.down_proj.packed for expert in self.every]
        on_gpu = any(weight is not None and weight.is_cuda for weight in weights)
        return not on_gpu and not any(isinstance(each, TritonMatmul) for each in packed)

    def _pack(self) -> PackedExperts | None:
        """All experts for one call of the C++ kernels, if these compute their products."""
        first = self.every[0]
        if first.activation == CLAMPED_SWIGLU:
            epilogue, activation = Epilogue.STORE, 0
        elif first.activation not in ACTIVATIONS:
            return None
        else:
            epilogue = Epilogue.GATED if first.gated else Epilogue.ACTIVATE
            activation = ACTIVATIONS[first.activation]
        blocks = []
        for expert in self.every:
            block = packed_block(expert.gate_up_proj, expert.down_proj)
            if block is None or block.up.paired != (epilogue is Epilogue.GATED):
                return None
            blocks.append(block)
        return PackedExperts(blocks, epilogue, activation, self.scale_inputs)

    def stack(self, device: torch.device) -> None:
        """Allocate one stack for all experts' parameters."""
        self.gate_up = Stack.of([expert.gate_up_proj for expert in self.every], device)
        self.down = Stack.of([expert.down_proj for expert in self.every], device)

    def forward(self, hidden: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The weighted sum of the experts that each token chose, this shard's summand of it.

        ``hidden`` [T, H], ``weights`` float32 [T, k], ``chosen`` int64 or int32 [T, k].
        """
        stacks = [each.weight for each in (self.gate_up, self.down) if each is not None]
        if any(can_fuse(hidden, chosen, weight) for weight in stacks):
            return self._fused(hidden, weights, chosen)
        if self.packed is not None:
            return self.packed(hidden, weights.to(hidden.dtype), chosen)
        groups = Groups.sort(chosen, len(self.every))
        rows = hidden.index_select(0, groups.tokens)
        weights = weights.to(hidden.dtype)
        if self.scale_inputs:
            rows = rows * weights.flatten().index_select(0, groups.pairs)[:, None]
            weights = torch.ones_like(weights)
        if self.gate_up is None:
            scales = weights.flatten().index_select(0, groups.pairs)[:, None]
            return self._one_by_one(torch.zeros_like(hidden), rows, scales, groups)
        outputs = self._stacked(rows, groups)
        # Back into the order of the tokens: index_add_ sums up in any order on CUDA.
        ordered = torch.empty_like(outputs).index_copy_(0, groups.pairs, outputs)
        return torch.bmm(weights[:, None], ordered.view(*chosen.shape, outputs.shape[1])).squeeze(1)

    def _one_by_one(self, sums: Tensor, rows: Tensor, scales: Tensor, groups: Groups) -> Tensor:
        start = 0
        for expert, end in zip(self.every, groups.ends.tolist(), strict=True):
            if end > start:
                here = slice(start, end)
                # A token's experts are added up in their own order, whatever else is in the
                # batch. (Of 512 tokens in bf16 all sums take 4.4 ms, with bmm 7.0.)
                sums.index_add_(0, groups.tokens[here], expert(rows[here]).mul_(scales[here]))
            start = end
        return sums

    def _fused(self, hidden: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """As :meth:`forward`, in five launches: the products gather and scatter rows themselves."""
        from tgi_cli.layers.triton_experts import combine
        from tgi_cli.layers.triton_sort import sort_pairs

        assert self.gate_up is not None
        assert self.down is not None
        top_k = chosen.shape[1]
        rows = ExpertRows(*sort_pairs(chosen, len(self.every)), shared_by=top_k)
        if self.scale_inputs:
            hidden = (hidden[:, None] * weights.to(hidden.dtype)[..., None]).flatten(0, 1)
            rows, weights = replace(rows, shared_by=1), torch.ones_like(weights)
        gate_up = expert_linear(hidden, self.gate_up.weight, self.gate_up.bias, rows)
        inner = self.every[0].inner(gate_up)
        bias = self.down.bias if self.every[0].down_proj.shard.rank == 0 else None
        rows = replace(rows, shared_by=0, scattered=True)
        return combine(expert_linear(inner, self.down.weight, bias, rows), weights)

    def _stacked(self, rows: Tensor, groups: Groups) -> Tensor:
        assert self.gate_up is not None
        assert self.down is not None
        assert isinstance(self.gate_up.weight, Tensor)
        assert isinstance(self.down.weight, Tensor)
        first = self.every[0].down_proj.shard.rank == 0
        gate_up = grouped_linear(rows, self.gate_up.weight, self.gate_up.bias, groups)
        inner = self.every[0].inner(gate_up)
        return grouped_linear(inner, self.down.weight, self.down.bias if first else None, groups)


@dataclass(frozen=True, slots=True)
class Stack:
    """One projection of all experts."""

    weight: Tensor | TiledWeight
    """[E, out, in]."""
    bias: Tensor | None
    """[E, out]."""

    @classmethod
    def of(cls, layers: Sequence[_GateUp | _Down], device: torch.device) -> Stack:
        """Memory for the layers' parameters, which become views of it."""

        def memory(name: str) -> Tensor:
            like = getattr(layers[0], name)
            stack = torch.empty((len(layers), *like.shape), dtype=like.dtype, device=device)
            for layer, own in zip(layers, stack, strict=True):
                setattr(layer, name, nn.Parameter(own, requires_grad=False))
            return stack

        return cls(memory("weight"), None if layers[0].bias is None else memory("bias"))

    @classmethod
    def of_loaded(cls, layers: Sequence[_GateUp | _Down]) -> Stack:
        """Stack what the quantization method made of the layers' weights, which become views.

        Raises:
            UnsupportedModelError: these differ from expert to expert.
        """
        products: list[object] = [layer.packed for layer in layers]
        tiled = [each.weight for each in products if isinstance(each, TritonMatmul)]
        weight: Tensor | TiledWeight
        if len(tiled) == len(layers) and all(each.is_like(tiled[0]) for each in tiled):
            weight = stack_weights(tiled)
            for index, product in enumerate(products):
                assert isinstance(product, TritonMatmul)
                product.weight = weight.of_expert(index)
        elif any(layer.weight is None for layer in layers):
            raise UnsupportedModelError(
                "the experts of a layer are quantized in several ways: there is no kernel for that",
                "serve the model on a CPU, or a checkpoint that quantizes all experts alike",
            )
        else:
            weight = _gathered(layers, "weight")
        return cls(weight, None if layers[0].bias is None else _gathered(layers, "bias"))


def _gathered(layers: Sequence[_GateUp | _Down], name: str) -> Tensor:
    """One parameter of all layers as one tensor, of which these become views."""
    stack = torch.stack([getattr(layer, name).detach() for layer in layers])
    for layer, own in zip(layers, stack, strict=True):
        setattr(layer, name, nn.Parameter(own, requires_grad=False))
    return stack


def packed_block(up: ColumnParallelLinear, down: RowParallelLinear) -> PackedBlock | None:
    """A feed-forward block for the C++ kernels; None if other kernels compute its products."""
    if not isinstance(up.packed, PackedMatrix) or not isinstance(down.packed, PackedMatrix):
        return None
    # The first shard adds the bias.
    return PackedBlock(up.packed, down.packed, up.bias, None if down.shard.rank else down.bias)


def leave_sum(layer: RowParallelLinear) -> None:
    """Have the caller sum up the shards' products."""
    layer.shard = Shard(rank=layer.shard.rank)
