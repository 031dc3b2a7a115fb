"""Encoder-decoder models of transformers (T5, BART, Marian...), one sequence at a time.

The modelling code and the attention are transformers'; linear layers, embedding, head and the
memory of keys and values are ours. A prompt goes through the encoder as a whole, in the step that
computes its last token; the decoder then takes one token at a time, as transformers' ``generate``
calls it. The sequences of a step follow one another, so batching saves nothing; in return, a
token's values depend on its own sequence alone, however that is scheduled.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import MoEModelOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from tgi_cli.attention import PagedAttention
from tgi_cli.config import DecoderFacts, ModelFacts
from tgi_cli.layers import Build
from tgi_cli.models.base import DecoderTokens, EncoderDecoderLM
from tgi_cli.models.config import TEXT_ALONE, ModelConfig
from tgi_cli.models.hf.arguments import cache_names
from tgi_cli.models.hf.buffers import fill_buffers
from tgi_cli.models.hf.masks import Unsupported
from tgi_cli.models.hf.model import refusals
from tgi_cli.models.hf.names import sources, stored_names
from tgi_cli.models.hf.sequence_cache import CacheLayout, sequence_cache
from tgi_cli.models.hf.shared_weights import StoredWeights, replace_layers
from tgi_cli.models.hf.skeleton import class_and_config
from tgi_cli.models.size_check import check_sizes
from tgi_cli.models.weight_map import Source

log = logging.getLogger(__name__)

_TRIED = 5
"""Encoder tokens of a dry run."""

_RELATIVE = 1 << 14
"""Limit of prompt and answer together where positions are relative, and the model has none: the
encoder's attention takes memory that grows with the square of the prompt."""

_USUAL = 1024
"""The same where no limit is set: T5 was trained on 512 tokens, to shorter answers."""


class TransformersEncoderDecoder(EncoderDecoderLM):
    """An encoder-decoder model of transformers. Its modules have transformers' names.

    Raises:
        UnsupportedModelError: it cannot be run; the message has the reason.
    """

    def __init__(self, config: ModelConfig, build: Build, device: torch.device) -> None:
        super().__init__()
        with refusals(config):
            whole = _skeleton(config, build.dtype)
            self._layout, self._width, self._vocab = _try(whole)
            left_out = _leave_out_images(whole)
            weights = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
            found = sources(whole, weights, stored_names(config))
            self._stored = stored = StoredWeights(found, whole.all_tied_weights_keys)
            self.ignored = (*stored.duplicates(), *_unneeded(whole), *left_out)
            self.loose = nn.ModuleList(replace_layers(whole, build, stored, device))
            fill_buffers(whole, whole, build, device, stored)
        if (left_out or type(whole).__name__ != config.architecture) and build.shard.rank == 0:
            log.warning(TEXT_ALONE)
        self._cache_names = cache_names(type(whole).forward)
        self._whole = (whole,)  # in a tuple: its modules are this model's own
        for name, child in whole.named_children():
            self.add_module(name, child)
        self._device, self._dtype = device, build.dtype
        never = _never_generated(config, self._vocab)
        self._never = torch.tensor(never, device=device) if never else None
        self.kv_specs = list(self._layout.specs)
        self.eval()

    def source(self, name: str) -> Source:
        """See :meth:`CausalLM.source`; an absent tied weight is one that it is tied to."""
        return self._stored.source(name)

    def decode(self, sequences: Iterable[DecoderTokens], attention: PagedAttention) -> Tensor:
        """See :meth:`EncoderDecoderLM.decode`."""
        parts = [part for each in sequences for part in self._decode_one(each, attention)]
        if not parts:
            return torch.empty(0, self._vocab, device=self._device)
        logits = torch.cat(parts).float()
        return logits if self._never is None else logits.index_fill_(1, self._never, -torch.inf)

    def _decode_one(self, tokens: DecoderTokens, attention: PagedAttention) -> Iterator[Tensor]:
        """Logits [1, V] after each of the last ``samples`` tokens."""
        whole, length = self._whole[0], tokens.encoder_tokens
        mask = torch.ones(1, length, dtype=torch.int64, device=self._device)
        if tokens.encoder_ids is None:
            # Layers find keys and values in the cache, and look at the shape alone.
            hidden = torch.zeros(1, 1, self._width, dtype=self._dtype, device=self._device)
            hidden = hidden.expand(1, length, self._width)
        else:
            hidden = self._encode(tokens.encoder_ids[None], mask)
        for index in range(len(tokens.ids)):
            cache = sequence_cache(
                self._layout,
                attention,
                tokens.block_table,
                length,
                tokens.start + index,
                encoded=tokens.encoder_ids is None or index > 0,
            )
            output = whole(
                encoder_outputs=MoEModelOutput(last_hidden_state=hidden),
                attention_mask=mask,
                decoder_input_ids=tokens.ids[None, index : index + 1],
                use_cache=True,
                **dict.fromkeys(self._cache_names, cache),
            )
            if index >= len(tokens.ids) - tokens.samples:
                yield output.logits[:, -1]

    def _encode(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Hidden states [1, P, width] of a prompt [1, P]."""
        encoder = self._whole[0].get_encoder()
        if hasattr(encoder, "set_attention_type"):  # or a short prompt would change BigBird's
            encoder.set_attention_type(encoder.config.attention_type)
        hidden: Tensor = encoder(input_ids=ids, attention_mask=mask)[0]
        return hidden


def encoder_decoder_facts(config: ModelConfig) -> ModelFacts:
    """What the engine must know of a checkpoint before it loads it.

    Raises:
        UnsupportedModelError: it cannot be run; the message has the reason.
    """
    check_sizes(config.path, config.raw, config.quantization is not None)
    with refusals(config), torch.inference_mode():
        whole = _skeleton(config, torch.float32)
        layout, _, vocab = _try(whole)
        most_inputs, most_outputs = _positions(whole)
        relative = most_inputs is None or most_outputs is None
        context = _RELATIVE if relative else (most_inputs or 0) + (most_outputs or 0)
        stated = config.generation or config.raw  # as transformers reads them
        return ModelFacts(
            architecture=config.architecture,
            model_type=whole.config.model_type,
            dtype=config.dtype,
            vocab_size=vocab,
            max_position_embeddings=context,
            eos_token_ids=config.eos_token_ids(vocab),
            kv_bytes_per_token=sum(spec.numbers for spec in layout.specs),
            torch_products=True,  # attention's
            decoder=DecoderFacts(
                start_id=_start_id(config, whole.config, vocab),
                first_id=_token(stated, "forced_bos_token_id", vocab),
                last_id=_token(stated, "forced_eos_token_id", vocab),
                max_input_tokens=most_inputs,
                max_tokens=most_outputs,
                usual_total_tokens=_USUAL if relative else None,
            ),
        )


def _skeleton(config: ModelConfig, dtype: torch.dtype) -> Any:
    """The model on the meta device.

    Raises:
        UnsupportedModelError: it is not known, or its code may not run.
        Unsupported: its class shows that it cannot be run.
    """
    known, own, trusted = class_and_config(config)
    if trusted or known.__name__ not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values():
        raise Unsupported("is not among transformers' encoder-decoder models from text to text")
    with torch.device("meta"):
        whole: Any = known._from_config(own, dtype=dtype)
    for pattern, planned in whole._get_dtype_plan(dtype).items():
        for path, weight in whole.state_dict(keep_vars=True).items():
            if re.search(pattern.replace("*", ".*"), path):
                weight.data = weight.data.to(planned)
    return whole.eval()


def _try(whole: Any) -> tuple[CacheLayout, int, int]:
    """Run the decoder on the meta device.

    Returns:
        What it caches, the width of the encoder's output, and the size of the vocabulary.
    """
    encoder = getattr(whole.get_encoder(), "config", whole.config)
    width = encoder.get_text_config().hidden_size
    hidden = torch.empty(1, _TRIED, width, dtype=whole.dtype, device="meta")
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with _as_a_rehearsal(whole):
        output = whole(
            encoder_outputs=MoEModelOutput(last_hidden_state=hidden),
            decoder_input_ids=torch.zeros(1, 1, dtype=torch.int64, device="meta"),
            use_cache=True,
            **dict.fromkeys(cache_names(type(whole).forward), cache),
        )
    return CacheLayout.of(cache), width, output.logits.shape[-1]


@contextmanager
def _as_a_rehearsal(whole: Any) -> Iterator[None]:
    """Have a model compute nothing that depends on values: there are none on the meta device."""
    chosen = whole.config._attn_implementation
    experts = [module for module in whole.modules() if type(module).__name__.endswith("SparseMLP")]
    for module in experts:
        module.forward = lambda hidden, *_, **__: hidden
    whole.set_attn_implementation("eager")  # others look at the values of masks
    try:
        yield
    finally:
        whole.set_attn_implementation(chosen)
        for module in experts:
            del module.forward


def _leave_out_images(whole: Any) -> list[str]:
    """Remove what an encoder has for images; returns expressions for the names of its tensors."""
    removed = []
    encoder = whole.get_encoder()
    for name in ("vision_tower", "multi_modal_projector"):
        if name in encoder._modules:
            delattr(encoder, name)
            removed.append(rf".*\b{name}\..*")
    return removed


def _unneeded(whole: Any) -> Iterator[str]:
    """Expressions for the names that transformers ignores."""
    for pattern in whole._keys_to_ignore_on_load_unexpected or ():
        yield f".*(?:{pattern}).*"
    # Parts of a larger model, such as SeamlessM4T's encoder of speech, that this class lacks.
    for part in whole._keys_to_ignore_on_load_missing or ():
        if part.isidentifier() and not hasattr(whole, part):
            yield rf"{part}\..*"


def _positions(whole: Any) -> tuple[int | None, int | None]:
    """The most tokens of the encoder and of the decoder; None where positions are relative."""
    config = whole.config
    found: list[int | None] = []
    for side in ("encoder", "decoder"):
        part = getattr(config, side, None) or config
        part = part.get_text_config() if hasattr(part, "get_text_config") else part
        for holder, name in (
            (config, f"max_{side}_position_embeddings"),
            (part, "max_position_embeddings"),
        ):
            value = getattr(holder, name, None)
            if isinstance(value, int):
                break
        first = 0
        for module in getattr(whole, f"get_{side}")().modules():
            if hasattr(module, "create_position_ids_from_input_ids") and hasattr(
                module, "position_embeddings"
            ):
                first = module.padding_idx + 1  # RoBERTa
        found.append(value - first if isinstance(value, int) else None)
    return found[0], found[1]


def _start_id(config: ModelConfig, own: Any, vocab: int) -> int:
    """The token that the decoder starts with. Raises Unsupported if none is stated."""
    for source, key in (
        (config.generation, "decoder_start_token_id"),
        (config.raw, "decoder_start_token_id"),
        (config.generation, "bos_token_id"),
        ({"bos_token_id": getattr(own, "bos_token_id", None)}, "bos_token_id"),
    ):
        token = _token(source, key, vocab)
        if token is not None:
            return token
    raise Unsupported("does not say which token an answer starts with (decoder_start_token_id)")


def _token(stated: Mapping[str, Any], key: str, vocab: int) -> int | None:
    """A token id of a configuration, or None. Raises Unsupported for anything else."""
    value = stated.get(key)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is not None and (type(value) is not int or not 0 <= value < vocab):
        raise Unsupported(f"states no token as {key}")
    return value


def _never_generated(config: ModelConfig, vocab: int) -> list[int]:
    """Single tokens that the generation config forbids, such as Marian's padding."""
    stated = config.generation or config.raw
    words = stated.get("bad_words_ids") or []
    words += [[token] for token in stated.get("suppress_tokens") or []]
    ids = {word[0] for word in words if isinstance(word, list) and len(word) == 1}
    return sorted(each for each in ids if type(each) is int and 0 <= each < vocab)
