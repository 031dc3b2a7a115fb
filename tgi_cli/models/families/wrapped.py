"""Models that take images, whose text part is that of a family here: LLaVA, SmolVLM, InternVL, ...

Their decoders are given plain vectors and positions that count up, so that the family's own reader
says all about them. What differs is where config.json and the checkpoint have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from tgi_cli.models.config import TEXT_ALONE, ModelConfig, text_part
from tgi_cli.models.spec import DecoderSpec
from tgi_cli.models.weight_files import file_header, weight_files
from tgi_cli.models.weight_map import Source


@dataclass(frozen=True, slots=True)
class Wrapper:
    """What transformers' class around a decoder says of it where config.json does not.

    Attributes:
        decoder: its model type.
        path: path of its tensors, as transformers writes them.
        tied: whether the head repeats the embedding.
        text_ties: whether that is so, too, where ``text_config`` says it.
    """

    decoder: str
    path: str = "model.language_model"
    tied: bool = False
    text_ties: bool = False


@dataclass(frozen=True, slots=True)
class Decoder:
    """A family that may be wrapped.

    Attributes:
        module: module of :mod:`tgi_cli.models.families`.
        architecture: under which it reads the decoder's configuration.
        defaults: of what the text part of a configuration may leave out, and a text model's may
            not.
    """

    module: str
    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}

WRAPPERS: Mapping[str, Wrapper] = {
    "DeepseekVLForConditionalGeneration": Wrapper("llama", tied=True),
    "Idefics2ForConditionalGeneration": Wrapper("mistral", "model.text_model"),
    "Idefics3ForConditionalGeneration": Wrapper("llama", "model.text_model"),
    "InternVLForConditionalGeneration": Wrapper("qwen2", tied=True),
    "JanusForConditionalGeneration": Wrapper("llama", tied=True),
    "LlavaForConditionalGeneration": Wrapper("llama", text_ties=True),
    "Lfm3VlForConditionalGeneration": Wrapper("lfm3", tied=True),
    "LightOnOcrForConditionalGeneration": Wrapper("qwen3", tied=True),
    "LlavaNextForConditionalGeneration": Wrapper("llama"),
    "LlavaNextVideoForConditionalGeneration": Wrapper("llama"),
    "LlavaOnevisionForConditionalGeneration": Wrapper("qwen2", text_ties=True),
    "Mistral3ForConditionalGeneration": Wrapper("mistral", tied=True),
    "SmolVLMForConditionalGeneration": Wrapper("llama", "model.text_model"),
    "VipLlavaForConditionalGeneration": Wrapper("llama"),
}
"""By architecture. transformers' configuration classes have these defaults."""

DECODERS: Mapping[str, Decoder] = {
    "lfm3": Decoder("lfm3", "Lfm3ForCausalLM"),
    "llama": Decoder("llama", "LlamaForCausalLM", _LLAMA),
    "mistral": Decoder("llama", "MistralForCausalLM", _LLAMA | {"intermediate_size": 14336}),
    "qwen2": Decoder("qwen", "Qwen2ForCausalLM"),
    "qwen3": Decoder("qwen", "Qwen3ForCausalLM"),
}
"""By model type."""


def wraps_family(config: ModelConfig) -> bool:
    """Whether the text part of a model is one of :data:`DECODERS`, under names known here."""
    wrapper = WRAPPERS.get(config.architecture)
    return (
        wrapper is not None
        and isinstance(config.raw.get("text_config"), dict)
        and _model_type(config, wrapper) in DECODERS
        and _stored_path(config, wrapper) is not None
    )


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/tasks/image_text_to_text"""
    wrapper = WRAPPERS[config.architecture]
    kind = _model_type(config, wrapper)
    decoder, stated = DECODERS[kind], config.get("text_config", dict, {})
    inner = text_part(config, wrapper.tied)
    raw = {**decoder.defaults, **inner.raw, "model_type": kind}
    if wrapper.text_ties and stated.get("tie_word_embeddings") is True:
        raw["tie_word_embeddings"] = True
    family = import_module(f"tgi_cli.models.families.{decoder.module}")
    text: DecoderSpec = family.read(replace(inner, architecture=decoder.architecture, raw=raw))
    path = _stored_path(config, wrapper) or wrapper.path

    def source(name: str) -> Source:
        own = text.source(name)
        return replace(own, names=tuple(_within(path, each) for each in own.names))

    return replace(
        text,
        source=source,
        # All but the decoder and its head, in the newer and in the older order of names.
        ignored=(rf"(?!{path}\.|language_model\.|lm_head\.).*",),
        notice=TEXT_ALONE,
    )


def _model_type(config: ModelConfig, wrapper: Wrapper) -> str:
    kind = config.get("text_config", dict, {}).get("model_type", wrapper.decoder)
    return kind if isinstance(kind, str) else ""


def _within(path: str, name: str) -> str:
    """A text model's name of a tensor, as that of a part of the model around it."""
    return f"{path}.{name.removeprefix('model.')}" if name.startswith("model.") else name


def _stored_path(config: ModelConfig, wrapper: Wrapper) -> str | None:
    """Where the checkpoint has the decoder; None if that is nowhere known here."""
    files = weight_files(config.path)
    names = {
        name
        for file, listed in files.items()
        if listed is not None or file.is_file()
        for name in (listed if listed is not None else file_header(file))
        if name.endswith("embed_tokens.weight")
    }
    if not names:
        return None if files else wrapper.path
    # The loader takes either for the newer one (:mod:`tgi_cli.models.weight_filling`).
    known = {f"{wrapper.path}.embed_tokens.weight", "language_model.model.embed_tokens.weight"}
    return wrapper.path if names & known else None
