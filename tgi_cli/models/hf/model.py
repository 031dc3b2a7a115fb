"""Any causal language model of transformers that attends through its attention interface.

The modelling code is transformers'; attention over the paged cache, linear layers, embedding and
head are ours, so that quantization, adapters and tensor parallelism apply. A model that cannot be
run so is refused with the reason, found in its configuration or by a dry run on the meta device.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tgi_cli.attention import PagedAttention
from tgi_cli.config import ModelFacts
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.layers import Build
from tgi_cli.models.base import CausalLM, ImageRows
from tgi_cli.models.config import TEXT_ALONE, ModelConfig
from tgi_cli.models.hf.attention import NO_ATTENTION_INTERFACE, RUN, probe
from tgi_cli.models.hf.buffers import fill_buffers
from tgi_cli.models.hf.image_positions import WHOLE_PROMPTS, position_axes, with_spans
from tgi_cli.models.hf.latent import keep_all_latents, keep_latents
from tgi_cli.models.hf.layers import (
    BatchedEmbedding,
    BatchedHead,
    UnreplacedWeights,
    linear,
    own_parts,
    planned,
)
from tgi_cli.models.hf.masks import READS_MASK, Unsupported
from tgi_cli.models.hf.names import sources, stored_names
from tgi_cli.models.hf.own_attention import ATTENDS_ITSELF
from tgi_cli.models.hf.products import has_torch_products, reads_weight, replaces_linear
from tgi_cli.models.hf.skeleton import Skeleton, build_skeleton
from tgi_cli.models.size_check import check_sizes
from tgi_cli.models.weight_map import Source

_CONTEXTS = ("max_position_embeddings", "max_seq_len", "seq_length")
"""What configurations call the length of the context."""

_ENDLESS = 1 << 20
"""The context of models without positions (states, ALiBi) that do not say for how long a text."""


class TransformersForCausalLM(CausalLM):
    """A model of transformers over flat batches. Its modules have transformers' names.

    Raises:
        UnsupportedModelError: it cannot be run; the message has the reason.
    """

    def __init__(self, config: ModelConfig, build: Build, device: torch.device) -> None:
        super().__init__()
        with refusals(config):
            skeleton = build_skeleton(config, build.dtype, build.max_positions)
            whole, decoder = skeleton.whole, skeleton.decoder
            weights = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
            self._sources = sources(whole, weights, stored_names(config))
            self._tied = dict(whole.all_tied_weights_keys)
            left_out = [*skeleton.indexers, *skeleton.towers, *skeleton.leave_out_the_rest()]
            self.ignored = (*_unexpected(skeleton), *_of_parts(self._sources, left_out))
            self.loose = nn.ModuleList(_replace(skeleton, build, self._sources))
            skeleton, output = _probe(skeleton)
            self._attention = skeleton.attention
            fill_buffers(whole, decoder, build, device, self._sources)
            at = skeleton.path(decoder)
            self._skeleton, self._head = skeleton, _LogitsHead(skeleton, output)
            hidden = output[0][0]
            logits = self.logits(hidden)
            vocab = decoder.config.vocab_size
            if logits.shape != (len(hidden), vocab):
                raise Unsupported(f"has logits {list(logits.shape)} for {vocab} tokens")
        _adopt(self, whole, decoder, at)
        self.kv_specs = with_spans(whole.config, self._attention.specs)
        self.position_axes = position_axes(whole.config)
        self.state_specs = [] if skeleton.cache is None else skeleton.cache.specs
        self.eval()
        if skeleton.takes_more or skeleton.towers:
            self.leaves_out = TEXT_ALONE

    def text_source(self, name: str) -> Source:
        """See :meth:`CausalLM.text_source`; an absent tied weight is the weight it is tied to."""
        tied = self._tied.get(name, name)
        return self._sources.get(name) or self._sources.get(tied) or Source((name,))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        images: ImageRows | None = None,
    ) -> Tensor:
        batched = positions[None] if positions.ndim == 1 else positions[:, None]
        vectors: Tensor | None = None
        others: dict[str, Any] = {}
        if images is not None:
            vectors = self._vectors(input_ids, images)[None]
            others = _deepstack(input_ids, images)
        with self._attention.running(attention):
            output = self._skeleton.call(
                input_ids[None], batched, attention.states, vectors, others
            )
        hidden: Tensor = output[0][0]
        return hidden

    def _vectors(self, input_ids: Tensor, images: ImageRows) -> Tensor:
        """As models that take images make them: their rows take the place of tokens' vectors."""
        vectors = self.token_vectors(input_ids.index_fill(0, images.indices, 0))
        return vectors.index_copy(0, images.indices, images.features.to(vectors.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)

    def token_vectors(self, input_ids: Tensor) -> Tensor:
        vectors: Tensor = self._skeleton.decoder.get_input_embeddings()(input_ids)
        return vectors


def transformers_facts(config: ModelConfig) -> ModelFacts:
    """What the engine must know of a checkpoint before it loads it.

    Raises:
        UnsupportedModelError: it cannot be run; the message has the reason.
    """
    check_sizes(config.path, config.raw, config.quantization is not None)
    with refusals(config), torch.inference_mode():
        skeleton = build_skeleton(config, torch.float32)
        torch_products = has_torch_products(skeleton, torch.float32)
        keep_all_latents(skeleton.decoder)
        skeleton, _ = _probe(skeleton)
        decoder, specs = skeleton.decoder, skeleton.attention.specs
        named = (getattr(decoder.config, key, None) for key in _CONTEXTS)
        context = next((value for value in named if value is not None), None)
        if context is None and (not specs or skeleton.attention.biased):
            context = _ENDLESS
        if not isinstance(context, int):
            raise Unsupported("does not say how long a context it can have")
        return ModelFacts(
            architecture=config.architecture,
            model_type=decoder.config.model_type,
            dtype=config.dtype,
            vocab_size=decoder.config.vocab_size,
            max_position_embeddings=context - skeleton.first_position,
            eos_token_ids=config.eos_token_ids(decoder.config.vocab_size),
            kv_bytes_per_token=sum(spec.numbers for spec in specs),
            dense_positions=None if skeleton.searches else skeleton.dense_positions,
            whole_prompts=skeleton.whole.config.model_type in WHOLE_PROMPTS,
            torch_products=torch_products,
        )


def _probe(skeleton: Skeleton) -> tuple[Skeleton, Any]:
    """Try how a model attends; returns the skeleton to be run, and the decoder's output."""
    decoder, config = skeleton.decoder, skeleton.decoder.config

    def attempt(tried: Skeleton) -> tuple[Skeleton, Any]:
        output = probe(decoder, config, tried.call, tried.attention, tried.stateful, tried.running)
        return tried, output

    try:
        return attempt(skeleton)
    except Exception:  # the model's code may raise anything
        code = sys.modules[type(decoder).__module__]
        interface = hasattr(code, "ALL_ATTENTION_FUNCTIONS")
        if skeleton.attention.layers or (
            interface and type(decoder).__name__ not in ATTENDS_ITSELF
        ):
            raise  # it attends through transformers' interface
    return attempt(skeleton.with_own_attention())


class _LogitsHead:
    """transformers' own way from hidden states to logits (scales, caps), without the decoder."""

    def __init__(self, skeleton: Skeleton, output: Any) -> None:
        self._text = skeleton.text
        around = skeleton.takes_more and skeleton.text is skeleton.whole
        kind = _AnyOutput if around else type(output)
        parent, _, name = skeleton.replaced.rpartition(".")
        self._fixed = _FixedOutput(kind, self._text.get_submodule(skeleton.replaced))
        setattr(self._text.get_submodule(parent), name, self._fixed)

    def __call__(self, hidden: Tensor) -> Tensor:
        self._fixed.hidden = hidden[None]
        logits: Tensor = self._text(inputs_embeds=hidden[None], use_cache=False).logits[0]
        self._fixed.hidden = None
        return logits.float()


def _deepstack(input_ids: Tensor, images: ImageRows) -> dict[str, Any]:
    """The arguments of a decoder that adds features of images after its first layers."""
    if not images.deepstack:
        return {}
    own = torch.zeros_like(input_ids, dtype=torch.bool).index_fill_(0, images.indices, True)
    return {"visual_pos_masks": own[None], "deepstack_visual_embeds": list(images.deepstack)}


class _AnyOutput(tuple[Tensor]):
    """The output of a model that takes more than text, of which there is only the first part."""

    def __new__(cls, last_hidden_state: Tensor) -> _AnyOutput:
        return super().__new__(cls, (last_hidden_state,))

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _FixedOutput(nn.Module):
    """Replaces the decoder, and returns given hidden states. Has its plain attributes."""

    hidden: Tensor | None = None

    def __init__(self, kind: type[Any], decoder: nn.Module) -> None:
        super().__init__()
        self._kind = kind
        plain = {k: v for k, v in vars(decoder).items() if k[0] != "_" and not callable(v)}
        self.__dict__.update({k: v for k, v in plain.items() if not isinstance(v, Tensor)})

    def forward(self, *_: object, **__: object) -> Any:
        return self._kind(last_hidden_state=self.hidden)


@contextmanager
def refusals(config: ModelConfig) -> Iterator[None]:
    """Raise UnsupportedModelError, naming the architecture, for errors of the model's code."""
    cannot = f"architecture {config.architecture} cannot be run through transformers"
    try:
        yield
    except UnsupportedModelError:
        raise
    except Unsupported as reason:
        raise UnsupportedModelError(f"{cannot}: it {reason}") from reason
    except Exception as error:  # the model's code may raise anything
        first = (str(error).splitlines() or [""])[0]
        if isinstance(error, KeyError) and RUN in first:  # it looked into a table of its own
            raise UnsupportedModelError(f"{cannot}: it {NO_ATTENTION_INTERFACE}") from error
        if isinstance(error, TypeError) and "WindowMask" in first:
            raise UnsupportedModelError(f"{cannot}: it {READS_MASK}") from error
        if isinstance(error, ModuleNotFoundError):
            raise UnsupportedModelError(
                f"{cannot}: its code needs the package {error.name}, which is not installed"
            ) from error
        if "meta tensor" in first:
            raise UnsupportedModelError(
                f"{cannot}: it looks at numbers while it computes, to decide how to go on"
            ) from error
        raise UnsupportedModelError(
            f"{cannot}: its code fails in a dry run ({type(error).__name__}: {first})"
        ) from error


def _unexpected(skeleton: Skeleton) -> Iterator[str]:
    """Expressions for the names that transformers ignores, of the whole model and its text."""
    for model in {skeleton.whole, skeleton.text, skeleton.decoder}:
        for pattern in model._keys_to_ignore_on_load_unexpected or ():
            yield f".*(?:{pattern}).*"


def _of_parts(found: Mapping[str, Source], parts: list[str]) -> Iterator[str]:
    """Expressions for the checkpoint's names of what belongs to these parts of a model."""
    prefixes = tuple(f"{part}." for part in parts)
    for name, source in found.items():
        if name.startswith(prefixes) or name in parts:
            yield from map(re.escape, source.names)


def _replace(
    skeleton: Skeleton, build: Build, stored: Container[str]
) -> Iterator[UnreplacedWeights]:
    """Put our layers into the model; yields the holders of the other weights."""
    whole, decoder = skeleton.whole, skeleton.decoder
    plan = getattr(decoder.config, "base_model_tp_plan", None) or {}
    if build.shard.size > 1:
        _require_shards(decoder, plan)
    head, table = skeleton.text.get_output_embeddings(), decoder.get_input_embeddings()
    if type(head) is not nn.Linear:
        raise Unsupported("has no plain linear head")
    tied = head.weight is table.weight
    ours = None
    if type(table) is nn.Embedding:
        ours = BatchedEmbedding(build, *table.weight.shape)
    seen: set[nn.Parameter] = set()
    replaces = replaces_linear(whole, build.dtype)
    twins: dict[tuple[object, ...], nn.Module] = {}
    start = len(skeleton.path(decoder)) + 1
    for path, module in list(whole.named_modules()):
        own = dict(module.named_parameters(recurse=False))
        parent = whole.get_submodule(path.rpartition(".")[0])
        new: nn.Module | None = None
        shared = (type(module), *map(id, own.values()))
        if shared in twins:  # layers may have modules in common, under a name each
            setattr(parent, path.rpartition(".")[2], twins[shared])
            continue
        if module is head:
            vocab, width = head.weight.shape
            tie = ours if tied else None
            new = BatchedHead(build, width, vocab, tie, head.bias is not None)
        elif module is table and ours is not None:
            new = ours
        elif type(module) is nn.Linear and reads_weight(
            cast(Hashable, type(parent)), path.rpartition(".")[2]
        ):
            yield UnreplacedWeights(module, path, stored, {})
        elif replaces(path, module):
            style = planned(plan, path[start:])
            # An expert does not get all tokens of a step, as adapters need.
            fitting = replace(build, lora=None) if "expert" in path else build
            if path.endswith(".kv_b_proj") and hasattr(parent, "expand_kv"):
                new = keep_latents(parent, module, style, build)
            else:
                new = linear(module, path, style, fitting, parent)
        else:
            shares = own_parts(module, path, path[start:], plan, build.shard)
            loose = UnreplacedWeights(module, path, stored, shares)
            if len(loose):
                yield loose
        if new is not None:
            setattr(parent, path.rpartition(".")[2], new)
        if module is not head:
            if seen.intersection(own.values()):
                raise Unsupported(f"uses the weights of {path} twice")
            seen.update(own.values())
            if own and not list(module.children()):
                twins[shared] = module if new is None else new


def _require_shards(decoder: PreTrainedModel, plan: Mapping[str, str]) -> None:
    """Raises Unsupported if a decoder cannot be divided among shards."""
    if not plan:
        raise Unsupported("has no plan of tensor parallelism")
    if any(hasattr(module, "rel_logits_proj") for module in decoder.modules()):
        raise Unsupported("has biases by distance (Inkling), which are not shared out to shards")


def _adopt(model: nn.Module, whole: PreTrainedModel, decoder: PreTrainedModel, at: str) -> None:
    """Make the parts of ``whole`` modules of ``model``, the decoder at the path it had."""
    here, theirs = model, cast(nn.Module, whole)
    later = []
    steps = at.split(".")
    for depth, name in enumerate(steps, 1):
        new = decoder if depth == len(steps) else nn.Module()
        later += [(here, other, child) for other, child in theirs.named_children() if other != name]
        here.add_module(name, new)
        here, theirs = new, getattr(theirs, name, nn.Module())
    for parent, name, child in later:  # after the table: a tied head is loaded later
        parent.add_module(name, child)
