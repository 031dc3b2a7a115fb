"""Reads the configuration of an EAGLE-3 head (https://arxiv.org/abs/2503.01840). No torch.

Three layouts are in use. They differ in where they state things, and in what they mean by the
target's layers:

==============  ==================================  ===========================================
layout          the target's layers                 counted as
==============  ==================================  ===========================================
SGLang's        ``eagle_config``'s                  outputs: layer 1 is the input of layer 2
                ``eagle_aux_hidden_state_layer_ids``
vLLM's          the same key outside of it          inputs
speculators     the same key, beside                inputs
                ``transformer_layer_config``
==============  ==================================  ===========================================

Without the key, they are the inputs of layers 2, n / 2 and n - 3 of the target's n.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.hub.safetensors_header import TensorEntry
from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.spec import AttentionSpec, MLPSpec, RopeSpec
from tgi_cli.models.speculators.detect import SpeculatorConfig

_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    """An EAGLE-3 head.

    Attributes:
        hidden_size: width of hidden states of the head.
        vocab_size: vocabulary size of the target.
        draft_vocab_size: tokens that the head knows.
        layers: the target's, whose inputs the head reads.
        attention: attention of its layer, whose input is twice as wide as its output.
        mlp: of its layer.
        eps: epsilon of its norms.
        rope: rotary angles.
        layer: name of the layer in the checkpoint.
        own_vocabulary: whether its ids are not the target's, but stored beside the weights.
        own_embedding, own_head: whether it has them, or takes the target's.
        norm_before_residual: whether what the layer adds to is normed.
        norm_before_fc: whether the target's states are normed together.
        fc_norm: whether each of them is normed.
        norm_output: whether what is fed back is normed.
        names: names of the tensors in the checkpoint, by those without a prefix.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    layers: tuple[int, ...]
    attention: AttentionSpec
    mlp: MLPSpec
    eps: float
    rope: RopeSpec
    layer: str
    own_vocabulary: bool
    own_embedding: bool
    own_head: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    names: Mapping[str, str]


def read_eagle3(
    speculator: SpeculatorConfig, num_layers: int, vocab_size: int, context: int
) -> Eagle3Spec:
    """The head that a checkpoint has.

    Args:
        speculator: of the method ``eagle3``.
        num_layers: number of layers of the target.
        vocab_size: vocabulary size of the target.
        context: positions that are served.

    Raises:
        UnsupportedModelError: an option that is not implemented.
        ModelError: values that cannot be.
    """
    whole, tensors = speculator.config, _Tensors(speculator.tensors)
    nested = "transformer_layer_config" in whole.raw
    config = whole
    if nested:
        config = replace(whole, raw=whole.get("transformer_layer_config", dict))
    inner = whole.get("eagle_config", dict, {})
    if inner.get("use_aux_hidden_state", True) is not True:
        raise _unsupported(whole, "a head that reads the last hidden state alone")
    layers = config.positive("num_hidden_layers", 1)
    if layers != 1:
        raise _unsupported(whole, f"a head of {layers} layers")
    stated = config.positive("vocab_size", vocab_size)
    if stated != vocab_size:
        raise whole.invalid(f"the head is for {stated} tokens, and the model has {vocab_size}")
    hidden_size = config.positive("hidden_size")
    attention = config_fields.attention(config)
    eps = config.get("rms_norm_eps", float, 1e-6)
    if "self_attn.q_norm.weight" in tensors.layer_names:
        attention = replace(attention, qk_norm_eps=eps)
    _require_no_window(config, context)
    positions = config.positive("max_position_embeddings", 2048)
    flags = {**inner, **whole.raw}

    def flag(key: str, default: bool = False) -> bool:
        value = flags.get(key)
        if value is not None and not isinstance(value, bool):
            raise whole.invalid(f"{key!r} is {value!r}, not bool")
        return default if value is None else value

    draft_vocab_size = whole.positive("draft_vocab_size", vocab_size)
    own_vocabulary = "d2t" in tensors.names
    if draft_vocab_size != vocab_size and not own_vocabulary:
        raise whole.invalid(f"there is no tensor 'd2t' for a vocabulary of {draft_vocab_size}")
    own_head = "lm_head.weight" in tensors.names
    own_embedding = "embed_tokens.weight" in tensors.names
    if own_embedding and not own_head and config.get("tie_word_embeddings", bool, False):
        raise _unsupported(whole, "an output head that is tied to the head's token table")
    if not own_head and own_vocabulary:
        raise whole.invalid("there is no tensor 'lm_head.weight' for a vocabulary of its own")
    return Eagle3Spec(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        layers=_layers(whole, num_layers),
        attention=attention,
        mlp=replace(config_fields.gated_mlp(config), bias=config.get("mlp_bias", bool, False)),
        eps=eps,
        rope=config_fields.rope(config, attention.head_dim, positions),
        layer=tensors.layer,
        own_vocabulary=own_vocabulary,
        own_embedding=own_embedding,
        own_head=own_head,
        norm_before_residual=flag("norm_before_residual", default=nested),
        norm_before_fc=flag("norm_before_fc"),
        fc_norm=flag("fc_norm"),
        norm_output=flag("norm_output"),
        names=tensors.names,
    )


class _Tensors:
    """Names of a head's tensors without the prefix that some files have, and with it."""

    def __init__(self, tensors: Mapping[str, TensorEntry]) -> None:
        self.names = {name.removeprefix("model."): name for name in tensors}
        middle = any(name.startswith("midlayer.") for name in self.names)
        self.layer = "midlayer" if middle else "layers.0"
        start = f"{self.layer}."
        self.layer_names = {n.removeprefix(start) for n in self.names if n.startswith(start)}


def _layers(config: ModelConfig, num_layers: int) -> tuple[int, ...]:
    """The target's layers whose inputs are read."""
    inner = config.get("eagle_config", dict, {})
    outputs = inner.get(_IDS)
    ids: Any = outputs or config.raw.get(_IDS) or (2, num_layers // 2, num_layers - 3)
    if not isinstance(ids, list | tuple) or not all(type(each) is int for each in ids):
        raise config.invalid(f"{_IDS!r} is no list of layers")
    found = tuple(each + 1 for each in ids) if outputs else tuple(ids)
    if not all(0 <= each <= num_layers for each in found):
        raise config.invalid(f"{_IDS!r} is {list(ids)}, of a model with {num_layers} layers")
    return found


def _require_no_window(config: ModelConfig, context: int) -> None:
    """Raises UnsupportedModelError for a window that is shorter than what is served."""
    kinds = config.get("layer_types", list, [])
    windowed = "sliding_attention" in kinds or config.raw.get("use_sliding_window") is True
    if windowed and config_fields.window(config, context) is not None:
        raise UnsupportedModelError(
            f"{config.file}: the head's layer has a window of {config.raw['sliding_window']} "
            f"tokens, and {context} are served",
            f"set --max-total-tokens to {config.raw['sliding_window']} at most",
        )


def _unsupported(config: ModelConfig, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{config.file}: {what} is not supported", "use another head")
