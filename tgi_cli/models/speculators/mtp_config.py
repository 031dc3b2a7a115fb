"""Reads MTP layers: layers of a target's own checkpoint that predict one more token. No torch.

They are DeepSeek V3's (https://arxiv.org/abs/2412.19437, section 2.2): the vector of a token and
the hidden state before it are normed, projected to one vector, and go through a decoder layer.

==========  =========================================  ==========================================
tensors     DeepSeek V3, GLM 4.5, GLM 4.7 Flash        MiMo
==========  =========================================  ==========================================
layer       ``model.layers.{n + i}.*``                 ``model.mtp_layers.{i}.*``
token       ``enorm``                                  ``token_layernorm``
state       ``hnorm``                                  ``hidden_layernorm``
projection  ``eh_proj``, of token and state            ``input_proj``, of state and token
output      ``shared_head.norm``                       ``final_layernorm``
fed back    before that norm                           after it
==========  =========================================  ==========================================

Of several such layers the first one is used, for all drafts. The token table and the output head
are the target's; copies in the checkpoint are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.hub.safetensors_header import TensorEntry
from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.deepseek_fields import grouped_experts
from tgi_cli.models.registry import decoder_spec
from tgi_cli.models.spec import LatentSpec, LayerSpec, NormSpec, RopeSpec
from tgi_cli.models.weight_map import PRE_NORMS, Names, Source, gated_parts


@dataclass(frozen=True, slots=True)
class MTPNames:
    """How checkpoints call the parts of an MTP layer, and how these are joined.

    Attributes:
        token_norm, state_norm, projection, output_norm: the modules.
        token_first: whether the token's vector comes before the state's in the projection.
        normed_feedback: whether the hidden state of the next draft is after the output norm.
    """

    token_norm: str
    state_norm: str
    projection: str
    output_norm: str
    token_first: bool = True
    normed_feedback: bool = False


_DEEPSEEK = MTPNames("enorm", "hnorm", "eh_proj", "shared_head.norm")
_MIMO = MTPNames(
    "token_layernorm",
    "hidden_layernorm",
    "input_proj",
    "final_layernorm",
    token_first=False,
    normed_feedback=True,
)

MTP_ARCHITECTURES = {
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "DeepseekV32ForCausalLM": _DEEPSEEK,
    "Glm4MoeForCausalLM": _DEEPSEEK,
    "Glm4MoeLiteForCausalLM": _DEEPSEEK,
    "MiMoForCausalLM": _MIMO,
}
"""Architectures whose checkpoints may have MTP layers that are served."""

_RECURRENT = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "NemotronHForCausalLM",
)
"""Architectures with MTP layers whose recurrent states cannot be taken back to before a draft."""


@dataclass(frozen=True, slots=True)
class MTPSpec:
    """An MTP layer.

    Attributes:
        hidden_size: width of hidden states of the target.
        names: names of its parts.
        prefix: prefix of its tensors.
        layer: the decoder layer.
        norm: of token, state and output.
        rope: rotary angles of the layer.
        source: where the checkpoint has a tensor of the decoder layer, which is called
            ``model.layers.{index}.*``.
        index: see ``source``.
    """

    hidden_size: int
    names: MTPNames
    prefix: str
    layer: LayerSpec
    norm: NormSpec
    rope: RopeSpec
    source: Callable[[str], Source]
    index: int


def num_layers(target: ModelConfig, tensors: Mapping[str, TensorEntry]) -> int:
    """How many MTP layers a target's checkpoint has.

    Raises:
        ModelError: values that cannot be.
    """
    names = MTP_ARCHITECTURES[target.architecture]
    count = 0
    while f"{_prefix(target, count)}.{names.projection}.weight" in tensors:
        count += 1
    return count


def require_mtp(target: ModelConfig) -> None:
    """Raises UnsupportedModelError for an architecture without MTP layers that are served."""
    if target.architecture in MTP_ARCHITECTURES:
        return
    why = "has none that are served"
    if target.architecture in _RECURRENT:
        why = "has recurrent states, which cannot be taken back to before a draft that is rejected"
    raise UnsupportedModelError(
        f"no MTP layers can draft: {target.architecture} {why}",
        f"supported: {', '.join(sorted(MTP_ARCHITECTURES))}",
    )


def read_mtp(target: ModelConfig, context: int) -> MTPSpec:
    """The first MTP layer of a target's checkpoint.

    Args:
        target: its configuration.
        context: positions that are served.

    Raises:
        UnsupportedModelError: an option that is not implemented.
        ModelError: values that cannot be.
    """
    read = {"Glm4MoeForCausalLM": _glm, "MiMoForCausalLM": _mimo}.get(target.architecture)
    return _deepseek(target, context) if read is None else read(target)


def _prefix(target: ModelConfig, index: int) -> str:
    if target.architecture == "MiMoForCausalLM":
        return f"model.mtp_layers.{index}"
    return f"model.layers.{target.positive('num_hidden_layers') + index}"


def _deepseek(target: ModelConfig, context: int) -> MTPSpec:
    """As the target's last layer."""
    spec = decoder_spec(target)
    layer, rope = spec.layers[-1], spec.ropes[0]
    assert isinstance(layer.mixer, LatentSpec)
    assert isinstance(rope, RopeSpec)
    indexer = layer.mixer.indexer
    if indexer is not None:
        if context > indexer.top_k:
            raise UnsupportedModelError(
                f"the MTP layer of {target.architecture} attends to {indexer.top_k} chosen tokens "
                f"of {context}, which is not supported",
                f"set --max-total-tokens to {indexer.top_k} at most",
            )
        layer = replace(layer, mixer=replace(layer.mixer, indexer=None))
    index = len(spec.layers)
    return MTPSpec(
        hidden_size=spec.hidden_size,
        names=_DEEPSEEK,
        prefix=_prefix(target, 0),
        layer=layer,
        norm=spec.final_norm,
        rope=rope,
        source=spec.source,
        index=index,
    )


def _glm(target: ModelConfig) -> MTPSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/glm4_moe"""
    config = config_fields.filled(
        target,
        {
            "topk_method": "noaux_tc", "n_routed_experts": 128, "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8, "n_shared_experts": 1, "norm_topk_prob": True,
            "routed_scaling_factor": 1.0, "num_key_value_heads": 8, "num_attention_heads": 96,
            "hidden_size": 4096, "partial_rotary_factor": 0.5,
        },
    )  # fmt: skip
    eps = config.get("rms_norm_eps", float, 1e-5)
    norm = NormSpec(eps)
    qk_norm = config.get("use_qk_norm", bool, False)
    attention = config_fields.attention(config, qk_norm_eps=eps if qk_norm else None)
    context = config.positive("max_position_embeddings", 131072)
    names = Names(
        modules={
            **PRE_NORMS,
            "mlp.router": "mlp.gate",
            "mlp.router.correction": "mlp.gate.e_score_correction_bias",
            **gated_parts("mlp.shared_expert", "mlp.shared_experts"),
        }
    )
    layers = config.positive("num_hidden_layers")
    return MTPSpec(
        hidden_size=config.positive("hidden_size"),
        names=_DEEPSEEK,
        prefix=_prefix(config, 0),
        layer=LayerSpec(
            mixer=replace(attention, output_bias=False),
            mlp=grouped_experts(config, softmax=False),
            input_norm=norm,
            mlp_norm=norm,
        ),
        norm=norm,
        rope=config_fields.rope(config, attention.head_dim, context),
        source=names,
        index=layers,
    )


def _mimo(target: ModelConfig) -> MTPSpec:
    """https://huggingface.co/XiaomiMiMo/MiMo-7B-RL: the layers are Qwen2's."""
    norm = NormSpec(target.get("rms_norm_eps", float, 1e-6))
    attention = config_fields.attention(target)
    context = target.positive("max_position_embeddings", 32768)
    return MTPSpec(
        hidden_size=target.positive("hidden_size"),
        names=_MIMO,
        prefix=_prefix(target, 0),
        layer=LayerSpec(
            mixer=replace(attention, bias=True, output_bias=False),
            mlp=config_fields.gated_mlp(target),
            input_norm=norm,
            mlp_norm=norm,
        ),
        norm=norm,
        rope=config_fields.rope(target, attention.head_dim, context),
        source=Names(layers="model.mtp_layers", modules=PRE_NORMS),
        index=0,
    )
