"""Decays, gains and step sizes of layers with recurrent states, from numbers of a token.

In float32; on a CPU, a token's results do not depend on the other tokens, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from tgi_cli.kernels.recurrence import DecayForm, RecurrenceLayer


@dataclass(frozen=True, slots=True, eq=False)
class DeltaGates:
    """Decays and gains of a layer with the gated delta rule, from numbers a and b of a token.

    A head's state, or with ``channels`` each of its rows, is multiplied by exp(g) for a token:

    - ``softplus``: g = -rate * softplus(a + bias) (Gated DeltaNet, Kimi Delta Attention)
    - ``sigmoid``: g = floor * sigmoid(rate * (a + bias)) (Kimi Delta Attention with a lower bound)

    The gain is factor * sigmoid(b).

    Attributes:
        rate: float32 [heads], above 0.
        bias: float32 [heads], or [heads * key_dim] with ``channels``.
        channels: whether there is a decay for each row of a state.
        form: form of g.
        floor: lower bound of g, below 0 (sigmoid).
        factor: factor of the gain.
    """

    rate: Tensor
    bias: Tensor
    channels: bool = False
    form: Literal["softplus", "sigmoid"] = "softplus"
    floor: float = 0.0
    factor: float = 1.0

    def logarithms(self, a: Tensor) -> Tensor:
        """g, float32, of a [T, heads], or of [T, heads * key_dim] with channels."""
        rate = self.rate
        if self.channels:
            rate = rate.repeat_interleave(len(self.bias) // len(rate))
        a = a.float() + self.bias
        if self.form == "softplus":
            return by_rows(F.softplus, a) * -rate
        return by_rows(torch.sigmoid, a * rate) * self.floor

    def decays(self, a: Tensor) -> Tensor:
        """exp(g), float32."""
        return by_rows(torch.exp, self.logarithms(a))

    def gains(self, b: Tensor) -> Tensor:
        """float32 of b [T, heads]."""
        return by_rows(torch.sigmoid, b.float()) * self.factor

    def layer(self, key_heads: int, key_dim: int, value_dim: int, eps: float) -> RecurrenceLayer:
        """The gated delta rule as kernels take it; see :func:`.recurrent.gated_delta`."""
        return RecurrenceLayer(
            heads=len(self.rate),
            key_heads=key_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            form=DecayForm.SOFTPLUS if self.form == "softplus" else DecayForm.SIGMOID,
            rate=self.rate,
            bias=self.bias,
            channels=self.channels,
            floor=0.0 if self.form == "softplus" else self.floor,
            beta_factor=self.factor,
            norm_eps=eps,
            scale=key_dim**-0.5,
        )


@dataclass(frozen=True, slots=True, eq=False)
class GivenGates:
    """As :class:`DeltaGates`, for logarithms of decays and gains that are given.

    Attributes:
        heads: heads of values.
        channels: whether there is a decay for each row of a state.
    """

    heads: int
    channels: bool = False

    def logarithms(self, a: Tensor) -> Tensor:
        """a in float32."""
        return a.float()

    def decays(self, a: Tensor) -> Tensor:
        """exp(a), float32."""
        return by_rows(torch.exp, self.logarithms(a))

    def gains(self, b: Tensor) -> Tensor:
        """b in float32."""
        return b.float()

    def layer(self, key_heads: int, key_dim: int, value_dim: int, eps: float) -> RecurrenceLayer:
        """The gated delta rule as kernels take it; see :func:`.recurrent.gated_delta`."""
        return RecurrenceLayer(
            heads=self.heads,
            key_heads=key_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            form=DecayForm.GIVEN,
            channels=self.channels,
            norm_eps=eps,
            scale=key_dim**-0.5,
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepSizes:
    """Step sizes and decays of the heads of a Mamba-2 layer, from a token's number dt.

    The step is softplus(dt + bias) within the bounds, the state's decay exp(-rate * step).

    Attributes:
        rate: float32 [heads], above 0.
        bias: float32 [heads].
        skip: float32 [heads], the factor of the input in the output.
        smallest, largest: bounds of a step.
    """

    rate: Tensor
    bias: Tensor
    skip: Tensor
    smallest: float = 0.0
    largest: float = math.inf

    def steps(self, dt: Tensor) -> Tensor:
        """float32 of dt [T, heads]."""
        return by_rows(F.softplus, dt.float() + self.bias).clamp(self.smallest, self.largest)

    def decays(self, steps: Tensor) -> Tensor:
        """Decay factors of the states, float32 [T, heads], from the :meth:`steps` [T, heads]."""
        return by_rows(torch.exp, steps * -self.rate)

    def layer(self, groups: int, state_size: int, head_dim: int) -> RecurrenceLayer:
        """The model as kernels take it; see :func:`.recurrent.state_space`."""
        return RecurrenceLayer(
            heads=len(self.rate),
            key_heads=groups,
            key_dim=state_size,
            value_dim=head_dim,
            delta=False,
            rate=self.rate,
            bias=self.bias,
            skip=self.skip,
            floor=self.smallest,
            ceiling=self.largest,
        )


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function of float32 [T, n], with the same bits however many rows there are.

    torch approximates exp differently for the last elements of a tensor and of each thread's share.
    In float64 the approximations agree to all bits of a float32.
    """
    if x.device.type != "cpu":
        return function(x.contiguous())
    return function(x.double()).float()
