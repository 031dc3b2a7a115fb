"""Medusa heads (https://arxiv.org/abs/2401.10774): head i drafts the token i + 1 further on.

===============  ======================================  ==========================================
tensors          FasterDecoding's and TGI's              vLLM's
===============  ======================================  ==========================================
blocks           ``{head}.{layer}.linear.*``             ``blocks.{head}.layers.{layer}.*``
output heads     ``{head}.{layers}.weight``              ``lm_heads.{head}.weight``
===============  ======================================  ==========================================

Without output heads (TGI's second version), the target's is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.layers import Build, LMHead, ReplicatedLinear, ops
from tgi_cli.models.base import CausalLM, LoadableModel
from tgi_cli.models.speculators.choice import likeliest
from tgi_cli.models.speculators.detect import SpeculatorConfig
from tgi_cli.models.weight_map import Source


@dataclass(frozen=True, slots=True)
class MedusaSpec:
    """What a checkpoint has.

    Attributes:
        num_heads: heads that are used.
        num_layers: residual blocks of each.
        bias: bias of the blocks.
        own_heads: whether each has an output head.
        numbered: whether modules are named by numbers alone.
        ignored: regular expressions for names of tensors that are not used.
    """

    num_heads: int
    num_layers: int
    bias: bool
    own_heads: bool
    numbered: bool
    ignored: tuple[str, ...] = ()


def read_medusa(speculator: SpeculatorConfig, num_heads: int) -> MedusaSpec:
    """The heads that a checkpoint has, of which ``num_heads`` are used.

    Raises:
        UnsupportedModelError: an option that is not implemented.
        ModelError: values that cannot be.
    """
    config, names = speculator.config, speculator.tensors
    if config.raw.get("truncated_vocab_size") not in (None, config.raw.get("vocab_size")):
        raise UnsupportedModelError(
            f"{config.file}: heads with a vocabulary of their own are not supported",
            "use other heads",
        )
    numbered = "0.0.linear.weight" in names
    key = "medusa_num_layers" if numbered else "num_hidden_layers"
    layers = config.positive(key, 1)
    head = f"0.{layers}.weight" if numbered else "lm_heads.0.weight"
    bias = "0.0.linear.bias" if numbered else "blocks.0.layers.0.bias"
    unused = "|".join(str(index) for index in range(num_heads, speculator.most_drafts))
    ignored = (rf"(blocks\.|lm_heads\.)?({unused})\..*",) if unused else ()
    return MedusaSpec(num_heads, layers, bias in names, head in names, numbered, ignored)


class Medusa(LoadableModel):
    """Implements :class:`tgi_cli.models.speculators.last_state.LastStateModule`.

    Args:
        spec: what the checkpoint has.
        build: how layers are made.
        target: loaded; its output head is used where heads have none.
        hidden_size, vocab_size: of the target.
    """

    def __init__(
        self,
        spec: MedusaSpec,
        build: Build,
        target: CausalLM,
        hidden_size: int,
        vocab_size: int,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.ignored = spec.ignored
        self._target = (target,)  # in a tuple, so that it does not become a submodule
        self.blocks = nn.ModuleList(
            ReplicatedLinear(build, hidden_size, hidden_size, spec.bias)
            for _ in range(spec.num_heads * spec.num_layers)
        )
        self.heads = nn.ModuleList(
            LMHead(build, hidden_size, vocab_size, None)
            for _ in range(spec.num_heads if spec.own_heads else 0)
        )

    def source(self, name: str) -> Source:
        kind, number, parameter = name.split(".")
        if kind == "heads":
            last = f"{number}.{self.spec.num_layers}"
            if not self.spec.numbered:
                last = f"lm_heads.{number}"
            return Source((f"{last}.{parameter}",))
        head, layer = divmod(int(number), self.spec.num_layers)
        if self.spec.numbered:
            return Source((f"{head}.{layer}.linear.{parameter}",))
        return Source((f"blocks.{head}.layers.{layer}.{parameter}",))

    def draft(self, hidden: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See :class:`tgi_cli.models.speculators.last_state.LastStateModule`."""
        found = []
        for index in range(count):
            state = hidden
            for layer in range(self.spec.num_layers):
                block = self.blocks[index * self.spec.num_layers + layer]
                state = state + ops.activate(block(state), "silu")
            head = self.heads[index] if len(self.heads) else self._target[0].logits
            found.append(likeliest(head(state)))
        ids, chances = zip(*found, strict=True)
        return torch.stack(ids, 1), torch.stack(chances, 1)
