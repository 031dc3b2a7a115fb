"""What a model that takes more than text hands to its decoder where it is given text alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tgi_cli.models.hf.arguments import CACHE_NAMES, parameters_of
from tgi_cli.models.hf.attention import PROBE, RUN
from tgi_cli.models.hf.masks import Unsupported, UnusableMask, WindowMask

TRIED = 7
"""Tokens that a model is given to try it."""

_HARMLESS = frozenset(
    {*CACHE_NAMES, "use_cache", "cache_position", "return_dict", "output_attentions"}
    | {"output_hidden_states", "output_router_logits", "logits_to_keep", "num_logits_to_keep"}
)


class _Reached(Exception):
    """The decoder was called."""


def first_position(whole: Any, decoder: Any) -> int:
    """Give the whole model a text, on the CPU, and look at what it hands to its decoder.

    No weight is needed: the table of embeddings is replaced, and the decoder is not run.

    Returns:
        The position of a text's first token.

    Raises:
        Unsupported: the decoder gets more than a text's vectors and positions.
    """
    special = {value for value in _numbers(whole.config.to_dict()) if type(value) is int}
    ids = torch.tensor([[n for n in range(3, 99) if n not in special][:TRIED]])
    vectors = torch.randn(1, TRIED, decoder.config.hidden_size)
    given = _given(whole, decoder, ids, vectors, PROBE)
    if any(isinstance(mask, UnusableMask) for mask in _masks(given)):
        # It depends on what the tokens are: what it is for these is looked at.
        given = _given(whole, decoder, ids, vectors, "eager")
    return _check_inputs(given, ids, vectors, decoder.config)


def _given(
    whole: Any, decoder: Any, ids: Tensor, vectors: Tensor, implementation: str
) -> dict[str, Any]:
    """The arguments of the decoder's call for a text."""
    table, given = decoder.get_input_embeddings(), {}

    def record(*args: Any, **kwargs: Any) -> None:
        names = parameters_of(type(decoder).forward)
        given.update(kwargs | dict(zip(list(names)[1:], args, strict=False)))
        raise _Reached

    try:
        with (
            _calling(decoder, record),
            _calling(table, lambda _: vectors),
            _trial(whole, decoder, implementation),
        ):
            whole(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    except _Reached:
        return given
    raise Unsupported("does not run its decoder for text alone")


@contextmanager
def _calling(module: Any, forward: Any) -> Iterator[None]:
    """Let a module run other code, and then what it ran before, which may not be its class's."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _masks(given: dict[str, Any]) -> list[Any]:
    mask = given.get("attention_mask")
    return list(mask.values()) if isinstance(mask, dict) else [mask]


@contextmanager
def _trial(whole: Any, decoder: Any, implementation: str) -> Iterator[None]:
    """Make masks of a kind, and compute beside the weights, on the CPU."""
    configs = (whole.config, decoder.config)
    for config in configs:
        config._attn_implementation = implementation
    try:
        with mock.patch.object(PreTrainedModel, "device", torch.device("cpu")):
            yield
    finally:
        for config in configs:
            config._attn_implementation = RUN


def _check_inputs(given: dict[str, Any], ids: Tensor, vectors: Tensor, config: Any) -> int:
    """Whether the decoder would do the same if it was given ids and positions alone.

    Returns the position of the first token.
    """
    embeds, named = given.pop("inputs_embeds", None), given.pop("input_ids", None)
    if embeds is not None and not (embeds.shape == vectors.shape and torch.equal(embeds, vectors)):
        raise Unsupported("changes token vectors before its decoder gets them")
    if embeds is None and (named is None or not torch.equal(named, ids)):
        raise Unsupported("changes token ids before its decoder gets them")
    positions, first = given.pop("position_ids", None), 0
    if positions is not None:
        first = int(positions.flatten()[0])
        if not (positions == torch.arange(first, first + TRIED)).all():
            raise Unsupported("does not count positions up, one by one")
    mask = given.pop("attention_mask", None)
    for kind, each in mask.items() if isinstance(mask, dict) else [("", mask)]:
        wanted = getattr(config, "sliding_window", None) if "sliding" in kind else None
        if isinstance(each, WindowMask):
            if each.window != wanted:
                raise Unsupported("masks text otherwise than its decoder")
        elif isinstance(each, Tensor) and each.ndim == 4:
            if not torch.equal(each[0, 0] == 0, torch.ones(TRIED, TRIED).tril().bool()):
                raise Unsupported("masks text otherwise than its decoder")
        elif each is not None and not (each.shape == ids.shape and each.bool().all()):
            raise Unsupported("attends with a mask or bias of its own making")
    for name, value in given.items():
        if isinstance(value, Tensor) and value.shape == ids.shape and torch.equal(value, ids):
            continue  # the ids, beside their vectors
        if name not in _HARMLESS and value is not None and value is not False:
            raise Unsupported(f"gives its decoder more than token vectors and positions ({name})")
    return first


def _numbers(value: Any) -> list[Any]:
    if isinstance(value, dict | list | tuple):
        inner = value.values() if isinstance(value, dict) else value
        return [number for each in inner for number in _numbers(each)]
    return [value]
