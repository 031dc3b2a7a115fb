"""Connects transformers' modelling code to paged attention.

transformers calls attention through a registry of functions, and builds masks through another
(https://huggingface.co/docs/transformers/main/en/attention_interface). Under the name
:data:`RUN` attention goes to the paged cache of the running step, and no mask is built. Under
:data:`PROBE` a forward on the meta device records the arguments of each layer, and evaluates every
mask: a model is served only if its masks are causal, with or without a sliding window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from tgi_cli.attention import KVSpec, PagedAttention
from tgi_cli.attention.sparse import attend_chosen
from tgi_cli.models.hf import biases
from tgi_cli.models.hf.arguments import CACHE_NAMES
from tgi_cli.models.hf.biases import DistanceBias, KeyBias
from tgi_cli.models.hf.indexers import EVERY_TOKEN, Chosen, EveryToken
from tgi_cli.models.hf.latent import absorbed, latent_expansion
from tgi_cli.models.hf.masks import Unsupported, UnusableMask, WindowMask, describe_mask, unmasked
from tgi_cli.models.hf.token_mixing import TokenMixingDetector, number_of_tokens

RUN, PROBE = "tgi_paged", "tgi_probe"
RUN_OWN = "tgi_paged_own"
"""As RUN, of models that compute attention themselves: they are given a mask."""
RUN_SPARSE = "tgi_paged_sparse"
"""As RUN, of models whose attention hands its mask to an indexer."""

_HARMLESS = frozenset(
    {"dropout", "input_ids", "position_ids", "cache_position", "use_cache", "output_attentions"}
    | {"output_hidden_states", "output_router_logits", "is_causal", "layer_idx", "return_dict"}
    | {*CACHE_NAMES}
)
"""Arguments of an attention call that change nothing here, or are checked by name."""


NO_ATTENTION_INTERFACE = "does not call attention through transformers' interface"


@dataclass(slots=True)
class AttentionContext:
    """State that a model's attention modules share, as their attribute ``tgi_attention``.

    Attributes:
        specs: specifications of the caches, in the order in which layers attend.
        layers: the index of each attention module's cache.
        readers: modules that attend to the cache of an earlier layer, and write nothing.
        repeated: the indices of modules that attend several times in a step, to a cache each.
        turns: how often they have, in this step.
        keys, values: of the layers with a cache of their own, in a dry run.
        biased: whether scores have a bias by distance.
        indexes: the index of each indexer's cache of keys.
        step: the paged attention of the step that is running.
    """

    specs: list[KVSpec] = field(default_factory=list)
    layers: dict[Hashable, int] = field(default_factory=dict)
    readers: set[Hashable] = field(default_factory=set)
    repeated: dict[Hashable, list[int]] = field(default_factory=dict)
    turns: Counter[Hashable] = field(default_factory=Counter)
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    biased: bool = False
    indexes: dict[Hashable, int] = field(default_factory=dict)
    step: PagedAttention | None = None

    def cache_of(self, layer: Hashable) -> int:
        """The index of the cache of a layer's next call in this step."""
        if layer not in self.repeated:
            return self.layers[layer]
        turn = self.turns[layer]
        self.turns[layer] = turn + 1
        return self.repeated[layer][turn]

    def index_cache(self, indexer: Hashable, key: Tensor) -> int:
        """The index of the cache of an indexer's keys [..., dim]; a dry run makes it."""
        if self.step is None:
            if indexer in self.indexes:
                raise Unsupported("has an indexer that is used twice")
            self.indexes[indexer] = len(self.specs)
            self.specs.append(KVSpec(1, key.shape[-1], values_in_keys=True, index=True))
            self.keys.append(key)
            self.values.append(key)
        elif isinstance(self.step, _DryRunAttention):
            self.step.expect(self.indexes[indexer])
        return self.indexes[indexer]

    @contextmanager
    def running(self, attention: PagedAttention) -> Iterator[None]:
        """Send attention to ``attention`` within the block."""
        self.step = attention
        self.turns.clear()
        try:
            yield
        finally:
            self.step = None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: DistanceBias | None = None,
    sinks: Tensor | None = None,
    indices: object = None,
    block_indices: object = None,
    **_: object,
) -> tuple[Tensor, None]:
    """One layer of a step: [1, heads, T, head_dim] each to [1, T, heads, head_dim]."""
    context = cast(AttentionContext, module.tgi_attention)
    assert context.step is not None
    writes = module not in context.readers
    if isinstance(attention_mask, Chosen):
        indices, attention_mask = attention_mask, None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(attention_mask, KeyBias):
        query, key = attention_mask.folded(query, key, scale)
        attention_mask = attention_mask.mask
    assert attention_mask is None or attention_mask is EVERY_TOKEN
    values: Tensor | None = value[0].transpose(0, 1)
    expansion = latent_expansion(module)
    if expansion is not None:
        (query, key), values = absorbed(expansion, query, key, value), None
    cache = context.cache_of(module)
    if position_bias is not None and not query.is_meta:
        states = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
        sink = None if sinks is None else sinks[0, ..., 0]
        return biases.attend(context.step, cache, states, scale, position_bias, sink)[None], None
    queries = query[0].transpose(0, 1)
    keys = key[0].transpose(0, 1) if writes else None
    values = values if writes else None
    chosen = block_indices if indices is None else indices
    if isinstance(chosen, Chosen) and chosen.choice is not None:
        kv = (keys, values)
        output = attend_chosen(context.step, cache, queries, kv, scale, chosen.choice, s_aux)
    else:
        output = context.step(cache, queries, keys, values, scale, softcap=softcap, sinks=s_aux)
    if expansion is not None:
        output = expansion.expand(output)
    return output[None].contiguous(), None


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: object = None,
    sinks: Tensor | None = None,
    indices: object = None,
    block_indices: object = None,
    **others: Any,
) -> tuple[Tensor, None]:
    context = cast(AttentionContext, module.tgi_attention)
    if isinstance(attention_mask, Chosen):
        indices, attention_mask = attention_mask, None
    attention_mask = None if attention_mask is EVERY_TOKEN else attention_mask
    if isinstance(attention_mask, KeyBias):
        query, key = attention_mask.folded(query, key, 1.0)
        attention_mask = attention_mask.mask
    chosen = block_indices if indices is None else indices
    # Eager attention leaves it to the mask, if there is one.
    causal = getattr(module, "is_causal", True) or isinstance(attention_mask, WindowMask)
    if not causal or others.get("is_causal") is False:
        raise Unsupported("has attention that is not causal")
    if not query.ndim == key.ndim == value.ndim == 4 or len(query) != 1:
        raise Unsupported("calls attention with tensors of another layout")
    expansion = latent_expansion(module)
    if expansion is not None:
        query, key = absorbed(expansion, query, key, value)
        value = key[..., : expansion.rank]
    if not query.shape[2] == key.shape[2] == value.shape[2] or query.shape[3] != key.shape[3]:
        raise Unsupported("attends to something else than its own tokens")
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        raise Unsupported(f"has {query.shape[1]} heads for {key.shape[1]} of keys on a shard")
    if isinstance(chosen, Chosen) and (softcap or chosen.heads not in (1, key.shape[1])):
        raise Unsupported("has sparse attention of another kind")
    if not isinstance(chosen, Chosen | EveryToken | None):
        raise Unsupported("has an indexer of another kind")
    gathered = isinstance(position_bias, DistanceBias)
    if not gathered:
        others |= {"position_bias": position_bias, "sinks": sinks}
    unknown = [
        name
        for name, given in others.items()
        if name not in _HARMLESS and given is not None and not isinstance(given, EveryToken)
    ]
    if unknown or isinstance(scaling, Tensor):
        raise Unsupported(f"modifies attention by {', '.join(unknown) or 'a learned scale'}")
    if isinstance(attention_mask, UnusableMask):
        raise Unsupported(attention_mask.reason)
    if attention_mask is not None and not isinstance(attention_mask, WindowMask):
        raise Unsupported("attends with a mask or bias of its own making")
    mask = attention_mask if isinstance(attention_mask, WindowMask) else WindowMask(None)
    if gathered and (mask.chunk is not None or softcap is not None or s_aux is not None):
        raise Unsupported("has a bias of its own beside chunks or caps of scores")
    window = mask.window
    if sliding_window is not None and window != sliding_window:
        raise Unsupported(f"has a sliding window of {sliding_window} that its mask does not have")
    record_layer(context, module, query, key, value, mask, expansion is not None, gathered)
    width = value.shape[3] if expansion is None else expansion.value_dim
    output = query.new_empty(1, query.shape[2], query.shape[1], width)
    return output, None


def record_layer(
    context: AttentionContext,
    layer: Hashable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: WindowMask,
    values_in_keys: bool = False,
    gathered: bool = False,
) -> None:
    """Note in a dry run what the layer that ``layer`` identifies keeps of a token."""
    if query.shape[2] != key.shape[2] or query.shape[3] != key.shape[3]:
        raise Unsupported("attends to something else than its own tokens")
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        raise Unsupported(f"has {query.shape[1]} heads for {key.shape[1]} of keys on a shard")
    width = value.shape[3]
    spec = KVSpec(
        key.shape[1],
        key.shape[3],
        mask.window,
        value_dim=None if width == key.shape[3] else width,
        chunk=mask.chunk,
        values_in_keys=values_in_keys,
        gathered=gathered,
    )
    again = layer in context.layers
    for index, known in enumerate(zip(context.keys, context.values, context.specs, strict=True)):
        if known[0] is key and known[1] is value and known[2] == spec:
            if again:
                raise Unsupported("attends to the same keys and values twice in a layer")
            context.readers.add(layer)
            context.layers[layer] = index
            return
    if again and layer in context.readers:
        raise Unsupported("attends to keys of its own beside those of another layer")
    if again:
        context.repeated.setdefault(layer, [context.layers[layer]]).append(len(context.specs))
    else:
        context.layers[layer] = len(context.specs)
    context.specs.append(spec)
    context.keys.append(key)
    context.values.append(value)


class _DryRunAttention:
    """Replaces paged attention on the meta device; expects the recorded layers."""

    def __init__(self, specs: list[KVSpec]) -> None:
        self.specs = specs
        self.next = 0

    def expect(self, layer: int) -> None:
        """The next cache that is written is this one."""
        if layer != self.next:
            raise Unsupported("attends differently without a mask")
        self.next += 1

    def __call__(
        self, layer: int, query: Tensor, key: Tensor | None, *_: object, **__: object
    ) -> Tensor:
        spec = self.specs[layer]
        if key is not None:
            self.expect(layer)
            if key.shape[1:] != (spec.num_kv_heads, spec.head_dim):
                raise Unsupported("attends differently without a mask")
        return query.new_empty(*query.shape[:2], spec.value_width)


def probe(
    decoder: nn.Module,
    config: Any,
    call: Callable[[Tensor, Tensor], Any],
    context: AttentionContext,
    stateful: bool = False,
    running: str = RUN,
) -> Any:
    """Run ``decoder``, which must be on the meta device, and record how its layers attend.

    Args:
        decoder: the model without its head.
        config: transformers', of the decoder; it is left with ``running`` as its attention.
        call: runs the decoder for ids and positions [1, T].
        context: an empty one, which the attention modules then share.
        stateful: whether layers may keep a state instead of keys and values.
        running: :data:`RUN`, :data:`RUN_OWN` or :data:`RUN_SPARSE`.

    Returns:
        The decoder's output.

    Raises:
        Unsupported: something cannot be served. Whatever the model's code raises.
    """
    tokens = number_of_tokens(decoder, config)
    for module in decoder.modules():
        module.tgi_attention = context  # type: ignore[assignment]  # any object may be an attribute

    def run(implementation: str, ids: int, positions: int) -> Any:
        config._attn_implementation = implementation
        many = torch.zeros(1, max(ids, positions), dtype=torch.int64, device="meta")
        return call(many[:, :ids], many[:, :positions])

    run(PROBE, 7, 7)
    context.keys.clear()
    context.values.clear()
    layers = getattr(config, "decoder_layers", None)  # where there could be an encoder
    layers = layers or getattr(config, "num_hidden_layers", len(context.layers))
    if not context.layers and not stateful:
        raise Unsupported(NO_ATTENTION_INTERFACE)
    # Layers that attend to images alone pass a text on as it is.
    layers -= sum(n < layers for n in getattr(config, "cross_attention_layers", None) or ())
    calls = len(context.layers) + sum(len(more) - 1 for more in context.repeated.values())
    if layers not in (calls, len(context.layers)) and not stateful:
        raise Unsupported(f"attends in {len(context.layers)} of its {layers} layers only")
    detector = TokenMixingDetector(tokens)
    with context.running(cast(PagedAttention, _DryRunAttention(context.specs))), detector:
        output = run(running, tokens, tokens)
    try:
        with context.running(cast(PagedAttention, _DryRunAttention(context.specs))):
            run(running, 7, 11)
    except Unsupported:
        raise
    except Exception:  # any error of the model's code: it used the positions
        return output
    if (stateful or context.biased) and not detector.counts:
        return output  # where a token is follows from the states, or from distances in the cache
    raise Unsupported("does not use the positions that it is given")


def _no_mask(**_: object) -> EveryToken:
    return EVERY_TOKEN


AttentionInterface.register(RUN, _attend)
AttentionInterface.register(RUN_SPARSE, _attend)
AttentionMaskInterface.register(RUN_SPARSE, _no_mask)
AttentionMaskInterface.register(RUN_OWN, unmasked)
AttentionInterface.register(PROBE, _record)
AttentionMaskInterface.register(PROBE, describe_mask)
