"""Declares what a decoder is made of. Families write it, :mod:`.decoder` builds it. No torch.

Sizes are those of the whole model, over all shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tgi_cli.models.weight_map import Source

_MOST_STREAMS = 64


@dataclass(frozen=True, slots=True)
class NormSpec:
    """An RMS norm, or a layer norm with mean and (unless ``bias`` is False) bias."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    one_plus: bool = False
    """The factor of an RMS norm is 1 + weight."""
    bias: bool = True

    def __post_init__(self) -> None:
        if self.eps < 0:
            raise ValueError(f"the epsilon of a norm is {self.eps}")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary angles that layers share. ``parameters`` as transformers' ``rope_parameters``."""

    dims: int
    """Leading dimensions of a head that are rotated."""
    max_positions: int
    """The model's context."""
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureSpec:
    """Queries grow with their position: 1 + scale * log(1 + floor((position + 1) / period)).

    Scalable-Softmax (https://arxiv.org/abs/2501.19399), as Llama 4 has it.
    """

    scale: float
    period: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """See :class:`tgi_cli.layers.Attention`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: int | None = 0
    """Index into :attr:`DecoderSpec.ropes`, or None if nothing depends on positions."""
    bias: bool = False
    output_bias: bool = False
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    qk_norm_eps: float | None = None
    qk_norm: Literal["heads", "one_plus", "wide", "unit"] = "heads"
    output_gate: bool = False
    head_gate: bool = False
    value_dim: int | None = None
    value_norm: bool = False
    values_from_keys: bool = False
    chunk: int | None = None
    slopes: tuple[float, ...] = ()
    spans: Literal["none", "window", "whole"] = "none"
    """How tokens of a bidirectional span attend to it; see :class:`tgi_cli.attention.KVSpec`."""
    cache: int | None = None
    """Index of an earlier layer's KV cache, which this one reads. Default: it has its own."""

    @property
    def kv_numbers(self) -> int:
        """Number of values that the layer caches per token."""
        value_dim = self.head_dim if self.value_dim is None else self.value_dim
        return 0 if self.cache is not None else self.num_kv_heads * (self.head_dim + value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """See :class:`tgi_cli.layers.delta.DeltaNet`."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    norm_eps: float
    gain: float = 1.0
    gate: Literal["silu", "sigmoid"] = "silu"
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """See :class:`tgi_cli.layers.indexer.Indexer`."""

    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """See :class:`tgi_cli.layers.latent.LatentAttention`."""

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    rope: int | None = 0
    """Index into :attr:`DecoderSpec.ropes`, or None if positions are not rotated."""
    bias: bool = False
    output_bias: bool = False
    scale: float | None = None
    norm_eps: float = 1e-6
    indexer: IndexerSpec | None = None

    @property
    def row(self) -> int:
        """Dimensions of a token's latent and rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def kv_numbers(self) -> int:
        """Number of values that the layer caches per token."""
        return self.row + (0 if self.indexer is None else self.indexer.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class SSMSpec:
    """See :class:`tgi_cli.layers.ssm.SSM`."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int
    conv_bias: bool = True
    bias: bool = False
    activation: str = "silu"
    norm_eps: float = 1e-5
    min_step: float = 0.0
    max_step: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvSpec:
    """See :class:`tgi_cli.layers.short_conv.ShortConv`."""

    kernel: int
    bias: bool = False


Mixer = AttentionSpec | LatentSpec | DeltaSpec | SSMSpec | ConvSpec
"""What mixes the tokens of a sequence, in one layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPSpec:
    """A feed-forward block: gated, or with a single projection up."""

    intermediate_size: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    sparsity: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """A mixture of experts; see :class:`tgi_cli.layers.moe.MoE`."""

    num_experts: int
    top_k: int
    intermediate_size: int
    activation: str = "silu"
    router: Literal["softmax_topk", "topk_softmax", "sigmoid_topk"] = "softmax_topk"
    normalize: bool = True
    """Whether the weights of the chosen experts add up to 1 (not topk_softmax)."""
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: int = 1
    """Number of best experts whose scores are summed for their group's."""
    scaling: float = 1.0
    router_bias: bool = False
    router_correction: bool = False
    """Whether ``mlp.router.correction`` is added to the scores by which experts are chosen."""
    router_float32: bool = False
    expert_bias: bool = False
    shared_intermediate_size: int | None = None
    """Width of a shared expert, which every token passes, or None if there is none."""
    shared_gate: bool = False
    gated: bool = True
    latent_size: int | None = None
    scale_inputs: bool = False
    expert_scales: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.top_k <= self.num_experts:
            raise ValueError(f"{self.top_k} of {self.num_experts} experts are chosen")


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPAndExpertsSpec:
    """Both side by side; see :class:`tgi_cli.layers.moe.MLPAndExperts`.

    It has norms of its own: the layer's ``mlp_norm`` is None.
    """

    dense: MLPSpec
    experts: MoESpec
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerSpec:
    """An embedding of the token for each layer; see :class:`tgi_cli.layers.PerLayerEmbedding`."""

    vocab_size: int
    width: int
    """Width of each layer's vector."""
    eps: float
    activation: str = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpSpec:
    """Several streams, of which each layer computes one; see :class:`tgi_cli.layers.AltUp`."""

    num_streams: int
    active: int
    eps: float
    laurel_rank: int
    scale_active: bool = True

    def __post_init__(self) -> None:
        # Gemma 3n has four; each is a whole hidden state, and the weights do not bound them before
        # the model is built.
        if not 0 <= self.active < self.num_streams <= _MOST_STREAMS:
            raise ValueError(
                f"stream {self.active} of {self.num_streams} is computed; at most "
                f"{_MOST_STREAMS} are supported"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer; parts that are None are absent.

    Sequential: ``x += output_norm(mixer(norm(x))); x += output_norm(mlp(norm(x)))``, where a mixer
    or MLP of None leaves out its half.
    Parallel: ``x += mixer(norm(x)) + mlp(norm(x))``, where an ``mlp_norm`` of None means that
    both are given what ``input_norm`` computed.
    """

    mixer: Mixer | None
    mlp: MLPSpec | MoESpec | MLPAndExpertsSpec | None
    input_norm: NormSpec | None = None
    mixer_output_norm: NormSpec | None = None
    mlp_norm: NormSpec | None = None
    mlp_output_norm: NormSpec | None = None
    parallel: bool = False
    residual_scale: float = 1.0
    """Factor of the outputs of mixer and MLP."""
    per_layer: PerLayerSpec | None = None
    """Adds an output that the layer's own embedding of the token gates; not in parallel layers."""
    output_scalar: bool = False
    """Whether the layer's output, the residual included, is multiplied by a learned number."""
    altup: AltUpSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A whole model."""

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    ropes: tuple[RopeSpec | TemperatureSpec, ...] = ()
    learned_positions: int | None = None
    """Rows of the table of position vectors that are added to the tokens'."""
    tie_word_embeddings: bool = False
    head_bias: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    deepstack: int = 0
    """After how many of the first layers features of images may be added."""
    source: Callable[[str], Source]
    """Where the checkpoint has a tensor, by the model's name for it."""
    ignored: tuple[str, ...] = ()
    """Regular expressions for whole names of unneeded tensors that a checkpoint may have."""
    notice: str = ""
    """A warning about the model, for the log."""
