"""An EAGLE-3 head (https://arxiv.org/abs/2503.01840).

Hidden states of several of the target's layers are combined to one. It and the vector of the token
after it go through one layer, whose output predicts the next token and stands for its hidden state
in the next pair.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor, nn

from tgi_cli.attention import KVSpec, PagedAttention
from tgi_cli.layers import (
    Attention,
    Build,
    ColumnParallelLinear,
    Embedding,
    GatedMLP,
    LMHead,
    ReplicatedLinear,
    RMSNorm,
    RotaryEmbedding,
)
from tgi_cli.layers.attention import Rotation
from tgi_cli.models.base import CausalLM, LoadableModel
from tgi_cli.models.spec import AttentionSpec
from tgi_cli.models.speculators.choice import DraftVocabulary, likeliest
from tgi_cli.models.speculators.eagle3_config import Eagle3Spec
from tgi_cli.models.speculators.pairs import PairOutput
from tgi_cli.models.weight_map import Source

_ROWS = 4096
"""Rows of token tables that are compared at once."""


class Eagle3(LoadableModel):
    """Implements :class:`tgi_cli.models.speculators.pairs.PairModule`.

    Args:
        spec: what the checkpoint has.
        build: how layers are made.
        target: loaded; it gives vectors and logits that the head does not have.
        target_size: width of the target's hidden states.
        device: device of the rotary angles.

    Attributes:
        kv_specs: specifications of the caches of its layer.
    """

    ignored = (r"(model\.)?t2d", r"verifier_.*", r".*embed_tokens\.weight")

    def __init__(
        self,
        spec: Eagle3Spec,
        build: Build,
        target: CausalLM,
        target_size: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.hidden_size, self.dtype = spec.hidden_size, build.dtype
        self._target = (target,)  # in a tuple, so that it does not become a submodule
        size, eps, count = spec.hidden_size, spec.eps, len(spec.layers)
        self.target_size = target_size
        self.input_norm = RMSNorm(build, count * target_size, eps) if spec.norm_before_fc else None
        self.fc_norm = nn.ModuleList(
            RMSNorm(build, target_size, eps) for _ in range(count if spec.fc_norm else 0)
        )
        self.fc = ReplicatedLinear(build, count * target_size, size, bias=False)
        self.layer = _Layer(spec, build)
        self.norm = RMSNorm(build, size, eps)
        self.embed_tokens = Embedding(build, spec.vocab_size, size) if spec.own_embedding else None
        self.lm_head = LMHead(build, size, spec.draft_vocab_size, None) if spec.own_head else None
        self.vocabulary: DraftVocabulary | None = None
        if spec.own_vocabulary:
            self.vocabulary = DraftVocabulary(spec.draft_vocab_size, spec.vocab_size)
        self.rope = RotaryEmbedding(
            spec.rope.dims,
            spec.rope.parameters,
            spec.rope.max_positions,
            build.dtype,
            device,
            build.max_positions,
        )
        self.kv_specs: list[KVSpec] = [self.layer.self_attn.kv_spec]

    def source(self, name: str) -> Source:
        if name.startswith("layer."):
            name = f"{self.spec.layer}.{name.removeprefix('layer.')}"
        return Source((self.spec.names.get(name, name),))

    def share_embedding(self) -> None:
        """Drop the token table, where it is a copy of the target's."""
        table, target = self.embed_tokens, self._target[0]
        if table is None or self.hidden_size != self.target_size:
            return
        device = self.norm.weight.device
        for begin in range(0, self.spec.vocab_size, _ROWS):
            end = min(begin + _ROWS, self.spec.vocab_size)
            ids = torch.arange(begin, end, device=device)
            if not torch.equal(table(ids), target.token_vectors(ids)):
                return
        self.embed_tokens = None

    def combine(self, states: Tensor) -> Tensor:
        """Inputs of the target's layers, side by side, to hidden states of pairs [T, H]."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if len(self.fc_norm):
            parts = torch.split(states, self.target_size, dim=-1)
            normed = [
                norm(part.contiguous()) for norm, part in zip(self.fc_norm, parts, strict=True)
            ]
            states = torch.cat(normed, dim=-1)
        combined: Tensor = self.fc(states)
        return combined

    def forward(
        self, hidden: Tensor, token_ids: Tensor, positions: Tensor, attention: PagedAttention
    ) -> PairOutput:
        """See :class:`tgi_cli.models.speculators.pairs.PairModule`."""
        if self.embed_tokens is not None:
            vectors = self.embed_tokens(token_ids)
        else:
            vectors = self._target[0].token_vectors(token_ids)
        output = self.layer(hidden, vectors, self.rope(positions), attention)
        final: Tensor = self.norm(output)
        return PairOutput(final, final if self.spec.norm_output else output)

    def choose(self, final: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`tgi_cli.models.speculators.pairs.PairModule`."""
        head = self._target[0].logits if self.lm_head is None else self.lm_head
        ids, chances = likeliest(head(final))
        return ids if self.vocabulary is None else self.vocabulary(ids), chances


class _Layer(nn.Module):
    """A decoder layer that is given two vectors: hidden and token, [T, H] each, to [T, H]."""

    def __init__(self, spec: Eagle3Spec, build: Build) -> None:
        super().__init__()
        size, eps = spec.hidden_size, spec.eps
        self.norm_before_residual = spec.norm_before_residual
        self.input_layernorm = RMSNorm(build, size, eps)
        self.hidden_norm = RMSNorm(build, size, eps)
        self.post_attention_layernorm = RMSNorm(build, size, eps)
        self.self_attn = _WideAttention(build, size, spec.attention)
        mlp = spec.mlp
        self.mlp = GatedMLP(build, size, mlp.intermediate_size, mlp.bias, mlp.activation)

    def forward(
        self, hidden: Tensor, vectors: Tensor, rotation: Rotation, attention: PagedAttention
    ) -> Tensor:
        normed = self.hidden_norm(hidden)
        both = torch.cat((self.input_layernorm(vectors), normed), dim=-1)
        residual = normed if self.norm_before_residual else hidden
        residual = residual + self.self_attn(both, rotation, attention)
        output: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return output


class _WideAttention(Attention):
    """Attention whose input is twice as wide as its output."""

    def __init__(self, build: Build, hidden_size: int, spec: AttentionSpec) -> None:
        arguments = asdict(spec)
        del arguments["rope"], arguments["cache"]
        super().__init__(build, 0, hidden_size, **arguments)
        parts = {name: part for name, (part, _) in self.qkv_proj.parts.items()}
        self.qkv_proj = ColumnParallelLinear(build, 2 * hidden_size, parts, spec.bias)
