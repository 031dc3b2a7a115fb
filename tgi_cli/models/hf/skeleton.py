"""A checkpoint's model on the meta device, as transformers builds it, and its text part.

A model that takes images or sound (``...ForConditionalGeneration``) is built whole, for its
tensors' names, and served if it hands plain text to its decoder as the decoder expects it: token
vectors, positions that count up and masks of its own kind. Its other parts are left out.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from tgi_cli.attention import StateCache
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.hf import indexers, own_states
from tgi_cli.models.hf.arguments import cache_names, parameters_of
from tgi_cli.models.hf.attention import PROBE, RUN, RUN_OWN, RUN_SPARSE, AttentionContext
from tgi_cli.models.hf.biases import replace_biases
from tgi_cli.models.hf.inkling import adapt_inkling2
from tgi_cli.models.hf.layers import EXPERTS, tame_routing
from tgi_cli.models.hf.masks import Unsupported
from tgi_cli.models.hf.own_attention import replace_own_attention
from tgi_cli.models.hf.refusals import refuse
from tgi_cli.models.hf.split import REHEARSAL, SplitCache, split_stateful
from tgi_cli.models.hf.step_cache import StepCache, give_positions, substitute
from tgi_cli.models.hf.towers import leave_out_towers, towers_without_libraries
from tgi_cli.models.hf.wrapped import TRIED, first_position

_LAYER_TYPES = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv"}
    | {
        "indexed_attention",
        "minimax_m3_sparse",
        "mamba",
        "mamba2",
        "attention",
        "hybrid",
        "hybrid_sliding",
        "mlp",
        "moe",
        "recurrent",
    }
)
"""Kinds of layers, of which a dry run shows what they do."""

_SPLIT = ("minimax", "zaya", "qwen4_exp_text", "inkling2_text")
"""Model types whose modules with states are called sequence by sequence."""

_PUBLISHED = {
    "KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration",
    "SeamlessM4TModel": "SeamlessM4TForTextToText",
    "SeamlessM4Tv2Model": "SeamlessM4Tv2ForTextToText",
}
"""Architectures that transformers' class of the model, or of its text part, is not named after."""


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model without weights.

    Attributes:
        whole: as transformers loads it, with the names of its tensors.
        text: the part of it that makes logits of token ids: ``whole``, or a causal language model
            within it.
        decoder: the part of ``text`` before the head.
        replaced: path within ``text`` of the module that gives the head its hidden states.
        first_position: of a text's first token.
        cache: what the decoder takes as its cache; None if it needs none.
        stateful: whether layers keep a recurrent state.
        attention: the state that its attention modules share.
        own_attention: whether it computes attention without transformers' interface.
        takes_cache: whether the decoder is given ``cache``.
        indexers: paths within ``whole`` of what would choose tokens for sparse attention, and is
            left out.
        towers: paths within ``whole`` of what the decoder has for images and sound.
        dense_positions: length of the longest text of which all tokens are chosen; None where
            attention is not sparse.
        searches: whether tokens of longer texts are chosen.
    """

    whole: Any
    text: Any
    decoder: Any
    replaced: str
    first_position: int
    cache: StepCache | None
    stateful: bool
    attention: AttentionContext
    indexers: list[str]
    towers: list[str]
    dense_positions: int | None
    searches: bool = False
    own_attention: bool = False
    takes_cache: bool = True

    @property
    def running(self) -> str:
        """The name of the attention that steps run with."""
        if self.own_attention:
            return RUN_OWN
        return RUN if self.dense_positions is None else RUN_SPARSE

    def with_own_attention(self) -> Skeleton:
        """The same, for a decoder that computes attention without transformers' interface."""
        cache = StepCache() if self.cache is None else self.cache
        attention = AttentionContext()
        cache.attend_itself(attention)
        takes_cache = replace_own_attention(self.decoder, attention, cache)
        return replace(
            self, cache=cache, attention=attention, own_attention=True, takes_cache=takes_cache
        )

    def call(
        self,
        ids: Tensor,
        positions: Tensor,
        states: StateCache | None = None,
        vectors: Tensor | None = None,
        others: Mapping[str, Any] | None = None,
    ) -> Any:
        """The decoder's output for ids and positions [1, T], int64, of a flat batch.

        ``vectors`` [1, T, hidden] are given to it instead of the ids; ``others`` are further
        arguments. Positions on three axes are [3, 1, T].
        """
        inputs: dict[str, Any] = {"input_ids": ids}
        if vectors is not None:
            inputs = {"inputs_embeds": vectors, **(others or {})}
        parameters = parameters_of(type(self.decoder).forward)
        if self.first_position:
            positions = positions + self.first_position
        if "position_ids" in parameters:
            inputs["position_ids"] = positions
        if self.cache is not None:
            self.cache.begin(positions.flatten(0, -2)[0], states)
            if self.takes_cache:
                inputs |= dict.fromkeys(cache_names(type(self.decoder).forward), self.cache)
        sized = self.own_attention or "position_ids" not in parameters
        embeddings = getattr(self.decoder, "embeddings", None)
        if self.own_attention and hasattr(embeddings, "token_type_embeddings"):
            inputs["token_type_ids"] = torch.zeros_like(ids)  # or a table limits a step's tokens
        if sized and "attention_mask" in parameters and not self.stateful:
            inputs["attention_mask"] = torch.ones_like(ids)  # or its size would be computed
        elif self.cache is None and self.decoder.config._attn_implementation in (PROBE, RUN_SPARSE):
            # Without a mask transformers looks at the positions' values for packed sequences.
            inputs["attention_mask"] = torch.ones_like(ids)
        return self.decoder(use_cache=False, **inputs)

    @property
    def takes_more(self) -> bool:
        """Whether it takes more than text."""
        return takes_more(self.whole.config)

    def path(self, part: nn.Module) -> str:
        """Where ``part`` is in the whole model."""
        return _path(self.whole, part)

    def leave_out_the_rest(self) -> list[str]:
        """Remove what takes anything but text; returns the removed modules' paths."""
        if not self.takes_more:
            return []
        head = self.text.get_output_embeddings()
        wanted = {self.decoder, head}
        removed: list[str] = []
        for path, module in list(self.whole.named_modules()):
            inside = any(path == gone or path.startswith(f"{gone}.") for gone in removed)
            kept = module in wanted or module in set(self.decoder.modules())
            bare = next(module.parameters(), None) is None  # a cap of logits, or a tower not built
            kept = kept or (bare and not isinstance(module, PreTrainedModel))
            if path and not inside and not kept and not wanted.intersection(module.modules()):
                parent, _, name = path.rpartition(".")
                delattr(self.whole.get_submodule(parent), name)
                removed.append(path)
        return removed


def build_skeleton(config: ModelConfig, dtype: torch.dtype, longest: int | None = None) -> Skeleton:
    """The model on the meta device, for texts of up to ``longest`` tokens. Default: of any length.

    Raises:
        UnsupportedModelError: it is not known, or its code may not run.
        Unsupported: its configuration or its classes show that it cannot be run.
    """
    refuse(config.architecture)
    known, own, trusted = class_and_config(config)
    _check(own, known)
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    multimodal = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values()
    if not trusted and known.__name__ not in {*causal, *multimodal}:
        raise Unsupported("is not a causal language model")
    options = {"experts_implementation": EXPERTS}
    try:
        whole = empty_model(known, own, dtype, attn_implementation=RUN, **options)
    except KeyError:  # it has a table of its own with kinds of attention
        whole = empty_model(known, own, dtype, attn_implementation="eager", **options)
    if trusted and takes_more(own):
        raise Unsupported("takes images or sound, not text alone")
    return _text_part(whole, longest)


def empty_model(known: Any, config: Any, dtype: torch.dtype, **options: str) -> Any:
    """A model of the class ``known`` without weights, in the dtypes that transformers gives it."""
    with torch.device("meta"), towers_without_libraries():
        whole: Any = known._from_config(config, dtype=dtype, **options)
    whole.eval()
    for pattern, planned_dtype in whole._get_dtype_plan(dtype).items():
        for path, weight in whole.state_dict(keep_vars=True).items():
            if re.search(pattern.replace("*", ".*"), path):
                weight.data = weight.data.to(planned_dtype)
    return whole


def takes_more(config: Any) -> bool:
    """Whether a model of this configuration, transformers', takes more than text."""
    return config.get_text_config() is not config


def class_and_config(config: ModelConfig) -> tuple[Any, Any, bool]:
    """The model's class, its configuration, and whether the class comes with the checkpoint."""
    name = config.architecture
    known: Any = getattr(transformers, _PUBLISHED.get(name, name), None)
    if known is None:
        code = config.get("auto_map", dict, {})
        if not code:
            raise UnsupportedModelError(
                f"architecture {name} is not known, neither here nor to transformers "
                f"{transformers.__version__}",
                "check 'architectures' in config.json, or install a newer transformers",
            )
        if "AutoModelForCausalLM" not in code:
            raise UnsupportedModelError(
                f"architecture {name} is defined by code that comes with the checkpoint, and "
                "that has no AutoModelForCausalLM"
            )
        if not config.trust_remote_code:
            raise UnsupportedModelError(
                f"architecture {name} is defined by code that comes with the checkpoint",
                "--trust-remote-code runs that code, if you trust it",
            )
        known = get_class_from_dynamic_module(code["AutoModelForCausalLM"], str(config.path))
    trusted = config.trust_remote_code and not known.__module__.startswith("transformers.")
    own: Any = AutoConfig.from_pretrained(config.path, trust_remote_code=trusted)
    return known, own, trusted


def _check(config: Any, known: type[PreTrainedModel]) -> None:
    """Refuse what a dry run would not notice, or would report less clearly."""
    if config.is_encoder_decoder and not known.__name__.endswith("ForCausalLM"):
        raise Unsupported("has an encoder")
    if known.config_class and not isinstance(config, known.config_class):
        raise Unsupported(f"is not what its model type {config.model_type!r} names")
    text = config.get_text_config()
    foreign = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if foreign:
        raise Unsupported(f"has layers of type {', '.join(sorted(foreign))}")


def _text_part(whole: Any, longest: int | None) -> Skeleton:
    """The parts of a model, with what depends on the longest sequence taken out."""
    text, decoder = whole, whole.get_decoder()
    is_model = isinstance(decoder, PreTrainedModel)
    if is_model and cast(Any, decoder).get_output_embeddings() is not None:
        text = decoder  # a causal language model within a larger model, or the whole
        decoder = text.get_decoder()
        if decoder is text:
            decoder = getattr(text, "model", text.base_model)
    if not isinstance(decoder, PreTrainedModel):
        decoder = text.base_model  # its head is what it calls its decoder
    if decoder is text or not isinstance(decoder, PreTrainedModel):
        raise Unsupported("has no decoder of its own beside the head")
    # It would look for padding in a text, and warn of it.
    cast(Any, decoder).warn_if_padding_and_no_attention_mask = lambda *_, **__: None
    tame_routing(decoder)
    adapt_inkling2(decoder)
    towers = leave_out_towers(decoder)
    dense = indexers.dense_positions(decoder)
    left_out: list[str] = []
    short = dense is not None and longest is not None and longest <= dense
    searches = dense is not None and not short and indexers.can_search(decoder)
    if searches:
        indexers.keep(decoder)
    else:
        left_out = indexers.leave_out(decoder)
    dense = dense or replace_biases(decoder)
    cache, stateful = _with_states(decoder)
    convolutions = {child for module in stateful for child in module.modules()}
    told = "position_ids" in parameters_of(type(decoder).forward)
    give_positions(decoder, None if told else cache)
    wrapped = takes_more(whole.config)
    first = first_position(whole, decoder) if wrapped else 0
    for module in decoder.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            first = cast(int, module.padding_idx) + 1  # RoBERTa; texts have no padding here
        if isinstance(module, nn.Conv1d | nn.RNNBase) and module not in convolutions:
            raise Unsupported(f"has layers that keep a state ({type(module).__name__})")
        kinds = rope_types(module)
        if any("dynamic" in kind or kind == "longrope" for kind in kinds):
            module.forward = MethodType(inspect.unwrap(type(module).forward), module)
        if "longrope" in kinds and len(kinds) > 1:
            raise Unsupported("has several rotary embeddings, longrope among them")
    path = _path(text, decoder)
    # Around a decoder of its own, a causal model computes the head's inputs by that alone.
    replaced = path.partition(".")[0] if wrapped and text is whole else path
    needed = cache if stateful or not told else None
    return Skeleton(
        whole=whole,
        text=text,
        decoder=decoder,
        replaced=replaced,
        first_position=first,
        cache=needed,
        stateful=bool(stateful),
        attention=AttentionContext(),
        indexers=[f"{_path(whole, decoder)}.{path}" for path in left_out],
        towers=[f"{_path(whole, decoder)}.{path}" for path in towers],
        dense_positions=dense,
        searches=searches,
        takes_cache=decoder.config.model_type != "xlstm",
    )


def _with_states(decoder: Any) -> tuple[StepCache, set[nn.Module]]:
    """The cache of a decoder, and its modules that keep recurrent states in it."""
    if decoder.config.model_type in own_states.TYPES:
        cache = StepCache()
        return cache, own_states.replace_own_states(decoder, cache)
    code = inspect.getsource(sys.modules[type(decoder).__module__])
    split = decoder.config.model_type in _SPLIT
    if not split or not type(decoder).__module__.startswith("transformers."):
        cache = StepCache()
        stateful = substitute(decoder, cache)
        if not stateful and "get_conv_state(" in code:
            raise Unsupported("keeps a state beside keys and values, in a way of its own")
        return cache, stateful
    cache = SplitCache()
    ids = torch.zeros(1, TRIED, dtype=torch.int64, device="meta")

    def rehearse() -> None:
        decoder.config._attn_implementation = REHEARSAL
        try:
            cache.begin(ids[0], None)
            given = dict.fromkeys(cache_names(type(decoder).forward), cache)
            decoder(input_ids=ids, position_ids=ids, use_cache=False, **given)
        finally:
            decoder.config._attn_implementation = RUN

    return cache, split_stateful(decoder, rehearse, cache)


def rope_types(module: nn.Module) -> list[str]:
    """The kinds of rotary embedding that a module computes."""
    kinds = getattr(module, "rope_type", None)
    return list(kinds.values()) if isinstance(kinds, dict) else [kinds] if kinds else []


def _path(whole: nn.Module, part: nn.Module) -> str:
    paths: dict[nn.Module, str] = {module: path for path, module in whole.named_modules()}
    return paths[part]
