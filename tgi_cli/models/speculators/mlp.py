"""An MLP speculator (https://arxiv.org/abs/2404.19124): ibm's, as TGI takes them.

A state begins as the target's hidden state. For each draft it is projected, the vector of the token
before is added, and an output head reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tgi_cli.layers import Build, Embedding, LMHead, ReplicatedLinear, RMSNorm, WeightSlot, ops
from tgi_cli.layers.base import empty_parameter
from tgi_cli.models.base import LoadableModel
from tgi_cli.models.speculators.choice import likeliest
from tgi_cli.models.speculators.detect import SpeculatorConfig
from tgi_cli.models.weight_map import Source

_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class MLPSpeculatorSpec:
    """What a checkpoint has.

    Attributes:
        stages: drafts that it was trained for.
        used: how many of them are used.
        hidden_size: width of hidden states of the target.
        inner_size: of the state.
        vocab_size: vocabulary size of the target.
        tied: whether all stages have the same weights, but for the first projection.
        scale_input: whether the target's hidden state is normed.
    """

    stages: int
    used: int
    hidden_size: int
    inner_size: int
    vocab_size: int
    tied: bool
    scale_input: bool


def read_mlp_speculator(
    speculator: SpeculatorConfig, used: int, hidden_size: int, vocab_size: int
) -> MLPSpeculatorSpec:
    """What a checkpoint has for a target of these sizes, of which ``used`` stages are used.

    Raises:
        ModelError: values that cannot be, or that are another target's.
    """
    config = speculator.config
    for key, expected in (("emb_dim", hidden_size), ("vocab_size", vocab_size)):
        if config.positive(key, expected) != expected:
            raise config.invalid(f"{key!r} is {config.raw[key]}, and the model's is {expected}")
    stages = config.positive("n_predict")
    inner = config.get("inner_dim", int, 0)
    if inner < 0:
        raise config.invalid(f"'inner_dim' is {inner}")
    tied = config.get("tie_weights", bool, False)
    if tied and stages < 2:
        raise config.invalid("a single stage has tied weights")
    return MLPSpeculatorSpec(
        stages=stages,
        used=used,
        hidden_size=hidden_size,
        inner_size=inner or hidden_size,
        vocab_size=vocab_size,
        tied=tied,
        scale_input=config.get("scale_input", bool, False),
    )


class MLPSpeculator(LoadableModel):
    """Implements :class:`tgi_cli.models.speculators.last_state.LastStateModule`."""

    def __init__(self, spec: MLPSpeculatorSpec, build: Build) -> None:
        super().__init__()
        self.spec = spec
        own = 1 if spec.tied else spec.used
        inner = spec.inner_size
        self.emb = nn.ModuleList(Embedding(build, spec.vocab_size, inner) for _ in range(own))
        projections = min(own + spec.tied, spec.used)
        self.proj = nn.ModuleList(
            ReplicatedLinear(build, inner if index else spec.hidden_size, inner, bias=False)
            for index in range(projections)
        )
        self.ln = nn.ModuleList(_BiasedNorm(build, inner) for _ in range(own))
        self.head = nn.ModuleList(LMHead(build, inner, spec.vocab_size, None) for _ in range(own))
        # Of tied weights a file may have copies; of others there are stages that are not used.
        self.ignored = tuple(
            rf"speculator\.{kind}\.{index}\..*"
            for kind, first in (("emb", own), ("ln", own), ("head", own), ("proj", projections))
            for index in range(first, spec.stages)
        )
        self.state_weight = 0.5 ** (0.5 / spec.stages)
        """So that the target's state has half of the last state's magnitude."""
        self.token_weight = math.sqrt((1 - self.state_weight**2) * inner / 2)

    def source(self, name: str) -> Source:
        return Source((f"speculator.{name}",))

    def draft(self, hidden: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See :class:`tgi_cli.models.speculators.last_state.LastStateModule`."""
        state, found = hidden, []
        if self.spec.scale_input:
            ones = torch.ones(hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
            state = ops.rms_norm(hidden, ones, _EPS) / math.sqrt(2)
        for stage in range(count):
            own = 0 if self.spec.tied else stage
            projection = min(stage, 1) if self.spec.tied else stage
            state = self.proj[projection](state) * self.state_weight
            state = state + self.emb[own](token_ids) * self.token_weight
            state = ops.activate(self.ln[own](state), "gelu")
            token_ids, chances = likeliest(self.head[own](state))
            found.append((token_ids, chances))
        ids, all_chances = zip(*found, strict=True)
        return torch.stack(ids, 1), torch.stack(all_chances, 1)


class _BiasedNorm(RMSNorm):
    """An RMS norm with a bias."""

    def __init__(self, build: Build, size: int) -> None:
        super().__init__(build, size, _EPS)
        self.bias = empty_parameter(size, dtype=build.dtype)

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield from super().slots(path)
        yield self.slot(f"{path}.bias", "bias", (self.size,))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias
