"""Llama (https://arxiv.org/abs/2302.13971) and what shares its skeleton: Mistral, Yi, SmolLM."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tgi_cli.attention import KVSpec, PagedAttention
from tgi_cli.layers import (
    Attention,
    Build,
    Embedding,
    GatedMLP,
    LMHead,
    RMSNorm,
    RotaryEmbedding,
)
from tgi_cli.models.base import CausalLM
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.shape import DecoderShape


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each normalized before and added after."""

    def __init__(self, shape: DecoderShape, build: Build, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(build, shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(
            build,
            index,
            shape.hidden_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.attention_bias,
        )
        self.post_attention_layernorm = RMSNorm(build, shape.hidden_size, shape.rms_norm_eps)
        self.mlp = GatedMLP(build, shape.hidden_size, shape.intermediate_size, shape.mlp_bias)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        rotation: tuple[Tensor, Tensor],
        attention: PagedAttention,
    ) -> tuple[Tensor, Tensor]:
        """The layer's output, not yet added to the residual, and the residual."""
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, rotation, attention)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class LlamaModel(nn.Module):
    """Embedding, decoder layers, final norm."""

    def __init__(self, shape: DecoderShape, build: Build, device: torch.device) -> None:
        super().__init__()
        self.embed_tokens = Embedding(build, shape.vocab_size, shape.hidden_size)
        self.rotary = RotaryEmbedding(
            shape.head_dim,
            shape.rope_parameters,
            shape.max_position_embeddings,
            build.dtype,
            device,
        )
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(shape, build, index) for index in range(shape.num_layers)
        )
        self.norm = RMSNorm(build, shape.hidden_size, shape.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, attention: PagedAttention) -> Tensor:
        hidden, residual = self.embed_tokens(input_ids), None
        rotation = self.rotary(positions)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, rotation, attention)
        normed: Tensor = self.norm(hidden, residual)[0]
        return normed


class LlamaForCausalLM(CausalLM):
    """Module names are those of the checkpoint."""

    def __init__(self, config: ModelConfig, build: Build, device: torch.device) -> None:
        super().__init__(config, build, device)
        shape = DecoderShape.read(config)
        self.model = LlamaModel(shape, build, device)
        tied = self.model.embed_tokens if shape.tie_word_embeddings else None
        self.lm_head = LMHead(build, shape.hidden_size, shape.vocab_size, tied)
        self.kv_specs = [
            KVSpec(shape.num_kv_heads, shape.head_dim, window) for window in shape.windows
        ]

    def forward(self, input_ids: Tensor, positions: Tensor, attention: PagedAttention) -> Tensor:
        hidden: Tensor = self.model(input_ids, positions, attention)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits
