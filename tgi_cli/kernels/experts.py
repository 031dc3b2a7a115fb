"""Mixtures of experts in C++, for bfloat16 on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from tgi_cli.kernels.library import cpp_library, threads
from tgi_cli.kernels.linear import Epilogue
from tgi_cli.kernels.packed_matrix import PackedMatrix

SCORES = {"softmax_topk": 0, "topk_softmax": 1, "sigmoid_topk": 2}
"""Numbers of scoring functions by their names in :class:`tgi_cli.layers.routing.Routing`."""


class RoutingStruct(ctypes.Structure):
    """``Routing`` of cpp/experts.h."""

    _fields_ = (
        ("matrix", c_void_p),
        ("bias", c_void_p),
        ("weight", c_void_p),
        ("correction", c_void_p),
        ("scores", c_int32),
        ("normalize", c_int32),
        ("groups", c_int64),
        ("top_groups", c_int64),
        ("best_of_group", c_int64),
        ("scaling", c_float),
    )


class BlockStruct(ctypes.Structure):
    """``Block`` of cpp/experts.h."""

    _fields_ = (
        ("up", c_void_p),
        ("down", c_void_p),
        ("up_bias", c_void_p),
        ("down_bias", c_void_p),
    )


class ExpertsStruct(ctypes.Structure):
    """``Experts`` of cpp/experts.h."""

    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("tokens", c_int64),
        ("top_k", c_int64),
        ("routing", c_void_p),
        ("logits", c_void_p),
        ("chosen", c_void_p),
        ("factors", c_void_p),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("experts", c_int64),
        ("blocks", c_void_p),
        ("shared", c_void_p),
        ("epilogue", c_int32),
        ("activation", c_int32),
        ("shared_activation", c_int32),
        ("scale_inputs", c_int32),
    )


class RouterArgs(ctypes.Structure):
    """``RouterLogits`` of cpp/experts.h."""

    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("tokens", c_int64),
        ("weight", c_void_p),
        ("experts", c_int64),
        ("inputs", c_int64),
        ("logits", c_void_p),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PackedBlock:
    """A feed-forward block.

    Attributes:
        up: the projection up, or gate and up.
        down: from the block's own width back.
        up_bias, down_bias: bfloat16 [out], or None.
    """

    up: PackedMatrix
    down: PackedMatrix
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def struct(self) -> BlockStruct:
        """For C++, as long as this object lives."""
        up_bias, down_bias = _address(self.up_bias), _address(self.down_bias)
        return BlockStruct(self.up.address, self.down.address, up_bias, down_bias)


@dataclass(frozen=True, slots=True, eq=False)
class PackedRouting:
    """How a router chooses experts.

    Attributes:
        matrix: the router's bfloat16 [experts, in], or None.
        bias: beside the matrix, bfloat16 [experts], or None.
        weight: the router's float32 [experts, in], or None. Without either, logits are given.
        correction: float32 [experts], added where experts are chosen, or None.
        scores: one of :data:`SCORES`.
        normalize, groups, top_groups, best_of_group, scaling: as those of
            :class:`tgi_cli.layers.routing.Routing`.
    """

    matrix: PackedMatrix | None
    bias: Tensor | None
    weight: Tensor | None
    correction: Tensor | None
    scores: int
    normalize: bool
    groups: int
    top_groups: int
    best_of_group: int
    scaling: float

    def struct(self) -> RoutingStruct:
        """For C++, as long as this object lives."""
        return RoutingStruct(
            None if self.matrix is None else self.matrix.address,
            _address(self.bias),
            _address(self.weight),
            _address(self.correction),
            self.scores,
            self.normalize,
            self.groups,
            self.top_groups,
            self.best_of_group,
            self.scaling,
        )

    def choose(self, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Logits float32 [T, E] to weights bfloat16 [T, k] and experts int64 [T, k], best first."""
        library = cpp_library()
        assert library is not None
        tokens, experts = logits.shape
        logits = logits.contiguous()
        factors = torch.empty(tokens, top_k, dtype=torch.bfloat16)
        chosen = torch.empty(tokens, top_k, dtype=torch.int64)
        library.tgi_choose(
            byref(self.struct()),
            c_void_p(logits.data_ptr()),
            c_int64(tokens),
            c_int64(experts),
            c_int64(top_k),
            c_void_p(chosen.data_ptr()),
            c_void_p(factors.data_ptr()),
        )
        return factors, chosen


class PackedExperts:
    """The experts of a layer, perhaps with their router and the expert that every token passes.

    Args:
        blocks: one per expert, all of the same sizes.
        epilogue: of products up. ``GATED``; ``ACTIVATE`` without gates; ``STORE``: gpt-oss's
            clamped SwiGLU follows.
        activation: one of :data:`tgi_cli.kernels.linear.ACTIVATIONS`.
        scale_inputs: whether what an expert is given is weighted, not its output.
        routing: for calls without a choice.
        top_k: experts per token, with ``routing``.
        shared: the shared expert, ``GATED``, added without a weight.
        shared_activation: its activation.
    """

    def __init__(
        self,
        blocks: Sequence[PackedBlock],
        epilogue: Epilogue,
        activation: int = 0,
        scale_inputs: bool = False,
        *,
        routing: PackedRouting | None = None,
        top_k: int = 0,
        shared: PackedBlock | None = None,
        shared_activation: int = 0,
    ) -> None:
        library = cpp_library()
        assert library is not None
        self._run = library.tgi_experts
        structs = (BlockStruct * len(blocks))(*(block.struct() for block in blocks))
        one = None if shared is None else shared.struct()
        chooses = None if routing is None else routing.struct()
        self._kept = (tuple(blocks), shared, routing, structs, one, chooses)
        self._out = blocks[0].down.out
        self.args = ExpertsStruct(
            top_k=top_k,
            routing=None if chooses is None else ctypes.addressof(chooses),
            experts=len(blocks),
            blocks=ctypes.addressof(structs),
            shared=None if one is None else ctypes.addressof(one),
            epilogue=epilogue,
            activation=activation,
            shared_activation=shared_activation,
            scale_inputs=scale_inputs,
        )
        """For C++, as long as this object lives."""
        self.blocks = self._kept[0]
        self.epilogue, self.activation, self.scale_inputs = epilogue, activation, scale_inputs

    def __call__(self, x: Tensor, factors: Tensor, chosen: Tensor) -> Tensor:
        """The weighted sum of the experts that each token chose.

        A row is the same to the last bit whatever rows are beside it.

        Args:
            x: bfloat16 [T, in].
            factors: bfloat16 [T, k].
            chosen: int64 [T, k], below the number of experts, no expert twice for a token.

        Returns:
            bfloat16 [T, out].
        """
        factors, chosen = factors.contiguous(), chosen.long().contiguous()
        return self._call(
            x, top_k=chosen.shape[1], chosen=chosen.data_ptr(), factors=factors.data_ptr()
        )

    def route(self, x: Tensor, logits: Tensor | None = None) -> Tensor:
        """As calling it, with the experts that the router chooses.

        ``logits`` float32 [T, experts], contiguous, are given if the routing makes none.
        """
        if logits is None:
            return self._call(x)
        return self._call(x, logits=logits.data_ptr())

    @property
    def makes_logits(self) -> bool:
        """Whether there is a routing that needs no logits."""
        routing = self._kept[2]
        return routing is not None and not (routing.matrix is None and routing.weight is None)

    def _call(self, x: Tensor, **values: int) -> Tensor:
        if x.stride(-1) != 1:
            x = x.contiguous()
        y = torch.empty(len(x), self._out, dtype=torch.bfloat16)
        call = ExpertsStruct.from_buffer_copy(self.args)
        call.x, call.x_stride, call.tokens = x.data_ptr(), x.stride(0), len(x)
        call.y, call.y_stride = y.data_ptr(), y.stride(0)
        for name, value in values.items():
            setattr(call, name, value)
        self._run(byref(call), threads())
        return y


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """bfloat16 x [T, in] times float32 [experts, in]: float32 [T, experts].

    A row is the same to the last bit whatever rows are beside it.
    """
    library = cpp_library()
    assert library is not None
    if x.stride(-1) != 1:
        x = x.contiguous()
    logits = torch.empty(len(x), len(weight))
    call = RouterArgs(
        x.data_ptr(),
        x.stride(0),
        len(x),
        weight.data_ptr(),
        len(weight),
        weight.shape[1],
        logits.data_ptr(),
    )
    library.tgi_router_logits(byref(call), threads())
    return logits


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
