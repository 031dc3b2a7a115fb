"""An MTP layer (https://arxiv.org/abs/2412.19437, section 2.2); see :mod:`.mtp_config`."""

from __future__ import annotations

import torch
from torch import Tensor

from tgi_cli.attention import KVSpec, PagedAttention
from tgi_cli.layers import Build, ReplicatedLinear, RMSNorm, RotaryEmbedding
from tgi_cli.models.base import CausalLM, LoadableModel
from tgi_cli.models.decoder import DecoderLayer, LayerInputs
from tgi_cli.models.decoder_blocks import Caches
from tgi_cli.models.speculators.choice import likeliest
from tgi_cli.models.speculators.mtp_config import MTPSpec
from tgi_cli.models.speculators.pairs import PairOutput
from tgi_cli.models.weight_map import Source


class MTPLayer(LoadableModel):
    """Implements :class:`tgi_cli.models.speculators.pairs.PairModule`.

    Args:
        spec: what the checkpoint has.
        build: how layers are made.
        target: loaded; it gives vectors of tokens and logits.
        device: device of the rotary angles.

    Attributes:
        kv_specs: specifications of the caches of its decoder layer.
    """

    ignored = (r".*\.embed_tokens\..*", r".*\.shared_head\.head\..*", r".*\.self_attn\.indexer\..*")

    def __init__(self, spec: MTPSpec, build: Build, target: CausalLM, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.hidden_size, self.dtype = spec.hidden_size, build.dtype
        self._target = (target,)  # in a tuple, so that it does not become a submodule
        size, eps = spec.hidden_size, spec.norm.eps
        self.token_norm = RMSNorm(build, size, eps)
        self.state_norm = RMSNorm(build, size, eps)
        self.projection = ReplicatedLinear(build, 2 * size, size, bias=False)
        caches = Caches()
        self.block = DecoderLayer(build, spec.layer, size, caches)
        self.output_norm = RMSNorm(build, size, eps)
        rope = spec.rope
        self.rope = RotaryEmbedding(
            rope.dims, rope.parameters, rope.max_positions, build.dtype, device, build.max_positions
        )
        self.kv_specs: list[KVSpec] = caches.kv

    def source(self, name: str) -> Source:
        spec = self.spec
        part, _, rest = name.partition(".")
        if part == "block":
            return spec.source(f"model.layers.{spec.index}.{rest}")
        return Source((f"{spec.prefix}.{getattr(spec.names, part)}.{rest}",))

    def combine(self, states: Tensor) -> Tensor:
        """The target's final hidden states are those of pairs."""
        return states

    def forward(
        self, hidden: Tensor, token_ids: Tensor, positions: Tensor, attention: PagedAttention
    ) -> PairOutput:
        """See :class:`tgi_cli.models.speculators.pairs.PairModule`."""
        vectors = self.token_norm(self._target[0].token_vectors(token_ids))
        states = self.state_norm(hidden)
        both = (vectors, states) if self.spec.names.token_first else (states, vectors)
        projected = self.projection(torch.cat(both, dim=-1))
        inputs = LayerInputs([self.rope(positions)])
        output, residual = self.block(projected, None, inputs, attention)
        if residual is not None:
            output = output + residual
        final: Tensor = self.output_norm(output)
        return PairOutput(final, final if self.spec.names.normed_feedback else output)

    def choose(self, final: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`tgi_cli.models.speculators.pairs.PairModule`."""
        return likeliest(self._target[0].logits(final))
