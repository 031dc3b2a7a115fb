"""The model of every built-in family: what a DecoderSpec declares, built of shared layers."""

from __future__ import annotations

import logging
from dataclasses import asdict

import torch
from torch import Tensor, nn

from tgi_cli.attention import PagedAttention
from tgi_cli.layers import (
    MLP,
    Attention,
    Build,
    Embedding,
    GatedMLP,
    LayerNorm,
    LMHead,
    PositionEmbedding,
    RMSNorm,
    RotaryEmbedding,
)
from tgi_cli.layers.attention import Rotation
from tgi_cli.models.base import CausalLM
from tgi_cli.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, MoESpec, NormSpec
from tgi_cli.models.weight_map import Source

log = logging.getLogger(__name__)

Norm = RMSNorm | LayerNorm


class DecoderLayer(nn.Module):
    """Attention and MLP around the residual, as a :class:`LayerSpec` arranges them."""

    def __init__(self, build: Build, spec: LayerSpec, hidden_size: int, index: int) -> None:
        super().__init__()
        self.rope = spec.attention.rope
        self.residual_scale = spec.residual_scale
        self.parallel = spec.parallel
        self.input_norm = _norm(build, spec.input_norm, hidden_size)
        self.self_attn = _attention(build, spec.attention, hidden_size, index)
        self.attention_output_norm = _norm(build, spec.attention_output_norm, hidden_size)
        self.mlp_norm = _norm(build, spec.mlp_norm, hidden_size)
        self.mlp = _mlp(build, spec.mlp, hidden_size)
        self.mlp_output_norm = _norm(build, spec.mlp_output_norm, hidden_size)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        rotations: list[Rotation],
        attention: PagedAttention,
    ) -> tuple[Tensor, Tensor]:
        """The layer's output, not yet added to the residual, and the residual."""
        rotation = None if self.rope is None else rotations[self.rope]
        normed, residual = _add(self.input_norm, hidden, residual)
        if self.parallel:
            other = normed if self.mlp_norm is None else self.mlp_norm(residual)
            attended = self.self_attn(normed, rotation, attention)
            return attended.add_(self.mlp(other)), residual
        attended = self.self_attn(normed, rotation, attention)
        attended = self._output(self.attention_output_norm, attended)
        normed, residual = _add(self.mlp_norm, attended, residual)
        return self._output(self.mlp_output_norm, self.mlp(normed)), residual

    def _output(self, norm: Norm | None, added: Tensor) -> Tensor:
        if norm is not None:
            added = norm(added)
        return added if self.residual_scale == 1.0 else added.mul_(self.residual_scale)


class DecoderModel(nn.Module):
    """Embedding, decoder layers, final norm."""

    def __init__(self, build: Build, spec: DecoderSpec, device: torch.device) -> None:
        super().__init__()
        self.embed_tokens = Embedding(build, spec.vocab_size, spec.hidden_size)
        self.embedding_scale = spec.embedding_scale
        self.embed_positions = (
            None
            if spec.learned_positions is None
            else PositionEmbedding(build, spec.learned_positions, spec.hidden_size)
        )
        self.ropes = nn.ModuleList(
            RotaryEmbedding(
                rope.dims,
                rope.parameters,
                rope.max_positions,
                build.dtype,
                device,
                build.max_positions,
            )
            for rope in spec.ropes
        )
        self.layers = nn.ModuleList(
            DecoderLayer(build, layer, spec.hidden_size, index)
            for index, layer in enumerate(spec.layers)
        )
        norm = _norm(build, spec.final_norm, spec.hidden_size)
        assert norm is not None
        self.norm = norm

    def embed(self, input_ids: Tensor, positions: Tensor) -> tuple[Tensor, list[Rotation]]:
        """What goes into the first layer, [T, hidden], and each rope's rotation of the step."""
        hidden: Tensor = self.embed_tokens(input_ids)
        if self.embedding_scale != 1.0:
            # The factor is rounded to the model's dtype, as where these models were trained.
            hidden = hidden * torch.tensor(self.embedding_scale, dtype=hidden.dtype)
        if self.embed_positions is not None:
            hidden = hidden.add_(self.embed_positions(positions))
        return hidden, [rope(positions) for rope in self.ropes]

    def forward(self, input_ids: Tensor, positions: Tensor, attention: PagedAttention) -> Tensor:
        hidden, rotations = self.embed(input_ids, positions)
        residual = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, rotations, attention)
        return self.norm.add(hidden, residual)[0]


class DecoderForCausalLM(CausalLM):
    """The model of a built-in family."""

    def __init__(self, spec: DecoderSpec, build: Build, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.model = DecoderModel(build, spec, device)
        tied = self.model.embed_tokens if spec.tie_word_embeddings else None
        self.lm_head = LMHead(build, spec.hidden_size, spec.vocab_size, tied, spec.head_bias)
        attentions = [m for m in self.model.modules() if isinstance(m, Attention)]
        self.kv_specs = [attention.kv_spec for attention in attentions]
        self.ignored = spec.ignored
        if spec.notice and build.shard.rank == 0:
            log.warning(spec.notice)

    def source(self, name: str) -> Source:
        return self.spec.source(name)

    def forward(self, input_ids: Tensor, positions: Tensor, attention: PagedAttention) -> Tensor:
        hidden: Tensor = self.model(input_ids, positions, attention)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        if self.spec.logit_scale != 1.0:
            logits = logits.mul_(self.spec.logit_scale)
        if self.spec.logit_softcap is not None:
            cap = self.spec.logit_softcap
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits


def _add(norm: Norm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """What goes into the block, and the residual with ``x`` added."""
    if norm is not None:
        return norm.add(x, residual)
    residual = x if residual is None else residual.add_(x)
    return residual, residual


def _norm(build: Build, spec: NormSpec | None, size: int) -> Norm | None:
    if spec is None:
        return None
    if spec.kind == "rms":
        return RMSNorm(build, size, spec.eps, spec.one_plus)
    return LayerNorm(build, size, spec.eps, spec.bias)


def _attention(build: Build, spec: AttentionSpec, hidden_size: int, index: int) -> Attention:
    arguments = asdict(spec)
    del arguments["rope"]
    return Attention(build, index, hidden_size, **arguments)


def _mlp(build: Build, spec: MLPSpec | MoESpec, hidden_size: int) -> nn.Module:
    if isinstance(spec, MoESpec):
        from tgi_cli.layers.moe import MoE

        moe: nn.Module = MoE(build, hidden_size, **asdict(spec))
        return moe
    kind = GatedMLP if spec.gated else MLP
    return kind(build, hidden_size, spec.intermediate_size, spec.bias, spec.activation)
