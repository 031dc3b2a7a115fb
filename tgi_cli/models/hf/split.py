"""Recurrent states of modules whose code is not built from functions that have a replacement.

Such a module is called by itself for each sequence of a step, and once for all those of one token.
It finds the states of their slots in what it takes for transformers' cache. Its sums are those of
transformers: how a text is cut into steps may change the last bits of a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from tgi_cli.attention import StateCache, StateSpec, StateTensor
from tgi_cli.models.hf.indexers import EVERY_TOKEN, EveryToken
from tgi_cli.models.hf.masks import Unsupported
from tgi_cli.models.hf.step_cache import StepCache
from tgi_cli.models.hf.token_mixing import unwatched

REHEARSAL = "tgi_rehearsal"
"""The name under which transformers' modules find attention that makes shapes alone."""

_Key = tuple[int, str, int]
"""Layer, kind of state, and its number in the layer."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens of the flat batch that a module is called for: rows of one length, one after another.

    Attributes:
        tokens: [B, T], their indices.
        source: slots [B] that have the states before them; None: there are none yet.
        targets: slots of the states after them, each [B] with -1 for none.
    """

    tokens: Tensor
    source: Tensor | None
    targets: tuple[Tensor, ...]


class SplitCache(StepCache):
    """Shows the states of some rows to the module that is called for them."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[_Key, int] = {}
        self._own: dict[_Key, Tensor] | None = None  # of the module that is called now
        self._source: Tensor | None = None  # slots of its rows
        self.callers: list[nn.Module] = []
        """Modules that run, in a rehearsal."""
        self.touched: list[nn.Module] = []
        """Modules that asked for a state, in a rehearsal."""

    def _state(self, key: _Key) -> Tensor | None:
        if self.callers:
            self.touched.append(self.callers[-1])
        if self._own is None:
            return None
        if key not in self._own and self._source is not None:
            assert self._states is not None
            states = self._states.tensors[self._places[key]]["state"]
            self._own[key] = states.index_select(0, self._source)
        return self._own.get(key)

    def _keep(self, key: _Key, state: Tensor) -> None:
        if self.callers:
            self.touched.append(self.callers[-1])
        if state.is_meta and key not in self._places:
            self._places[key] = len(self.specs)
            tensor = StateTensor("state", tuple(state.shape[1:]), state.dtype)
            self.specs.append(StateSpec((tensor,)))
        if self._own is not None:
            self._own[key] = state

    # What modules of transformers ask for.

    def has_previous_state(self, *_: object, **__: object) -> bool:
        return self._source is not None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        return self._state((layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        return self._state((layer_idx, "recurrent", state_idx))

    def get_linear_cache(self, layer_idx: int) -> Any:
        return self._state((layer_idx, "linear", 0))

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        self._keep((layer_idx, "linear", 0), state)

    def update_conv_state(
        self,
        x: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: object,
    ) -> Tensor:
        key = (layer_idx, "conv", state_idx)
        before = self._state(key)
        size = conv_kernel_size or x.shape[-1]
        if key in self._places:
            size = self.specs[self._places[key]].tensors[0].shape[-1]
        whole = x if before is None else torch.cat([before, x], dim=-1)
        last = whole[..., -size:]
        if last.shape[-1] < size:
            last = nn.functional.pad(last, (size - last.shape[-1], 0))
            whole = last if before is None else whole
        self._keep(key, last)
        return whole

    def update_recurrent_state(
        self, state: Tensor, layer_idx: int = 0, state_idx: int = 0, **_: object
    ) -> Tensor:
        self._keep((layer_idx, "recurrent", state_idx), state)
        return state

    # A module's calls.

    def split(self, module: nn.Module) -> None:
        """From now on call ``module`` for each sequence of a step by itself."""
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._own is not None:
                return own(*args, **kwargs)
            if self._states is None:  # a dry run
                self._own, self._source = {}, None
                try:
                    with unwatched():
                        return own(*args, **kwargs)
                finally:
                    self._own = None
            return self._run(own, args, kwargs)

        module.forward = forward

    def _run(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._states is not None
        total = len(self.positions)
        output: Any = None
        for piece in _pieces(self._states):
            mine = [_cut(arg, piece.tokens, total) for arg in args]
            named = {name: _cut(arg, piece.tokens, total) for name, arg in kwargs.items()}
            self._own, self._source = {}, piece.source
            try:
                part = own(*mine, **named)
                self._store(self._own, piece.targets)
            finally:
                self._own = None
            output = _joined(output, part, piece.tokens, total)
        return output

    def _store(self, own: dict[_Key, Tensor], targets: tuple[Tensor, ...]) -> None:
        assert self._states is not None
        for key, state in own.items():
            into = self._states.tensors[self._places[key]]["state"]
            for slots in targets:
                kept = slots >= 0
                into[slots[kept]] = state[kept].to(into.dtype)


def _pieces(states: StateCache) -> Iterator[_Piece]:
    """All decodes at once, then each prefill; cut where a snapshot is due."""
    step = states.step_on_host()
    device = step.slots_in.device

    def tensor(*numbers: int) -> Tensor:
        return torch.tensor(numbers, device=device)

    rows, start = [], 0
    for row, length in enumerate(step.query_lens_host):
        rows.append((row, start, length))
        start += length
    decodes = [each for each in rows if each[2] == 1 and step.slots_in_host[each[0]] >= 0]
    if decodes:
        which = tensor(*(row for row, _, _ in decodes))
        yield _Piece(
            tensor(*(first for _, first, _ in decodes))[:, None],
            step.slots_in[which],
            (step.slots_out[which], step.snapshot_slots[which]),
        )
    for row, first, length in rows:
        if (row, first, length) in decodes:
            continue
        source, end = step.slots_in_host[row], first + length
        snapshot, after = step.snapshot_slots_host[row], step.snapshot_after_host[row]
        if snapshot >= 0:
            middle = torch.arange(first, first + after, device=device)[None]
            last = after == length
            yield _Piece(
                middle,
                tensor(source) if source >= 0 else None,
                (tensor(snapshot), *((tensor(step.slots_out_host[row]),) if last else ())),
            )
            source, first = snapshot, first + after
        if first < end:
            yield _Piece(
                torch.arange(first, end, device=device)[None],
                tensor(source) if source >= 0 else None,
                (tensor(step.slots_out_host[row]),),
            )


def _cut(value: Any, tokens: Tensor, total: int) -> Any:
    """The tokens of a piece, [B, T, ...], of each tensor [1, all tokens, ...] in an argument."""
    if isinstance(value, Tensor):
        if value.ndim >= 2 and value.shape[:2] == (1, total):
            return value[0][tokens]
        return value
    if isinstance(value, tuple | list):
        return type(value)(_cut(each, tokens, total) for each in value)
    return value


def _joined(output: Any, part: Any, tokens: Tensor, total: int) -> Any:
    """Put a piece's part of the output [B, T, ...] into the whole [1, all tokens, ...]."""
    if isinstance(part, tuple):
        wholes = output or (None,) * len(part)
        pairs = zip(wholes, part, strict=True)
        return tuple(_joined(whole, each, tokens, total) for whole, each in pairs)
    if not isinstance(part, Tensor) or part.shape[:2] != tokens.shape:
        return part  # not of tokens: a state that the caller does not use
    if output is None:
        output = part.new_empty(1, total, *part.shape[2:])
    elif output.shape[:2] != (1, total):
        return part  # as many heads as this piece has tokens
    output[0][tokens] = part
    return output


def split_stateful(
    decoder: nn.Module, call: Callable[[], Any], cache: SplitCache
) -> set[nn.Module]:
    """Find the modules that ask for states in a rehearsal, ``call``, and split them.

    Returns them.
    """
    hooks = []
    for module in decoder.modules():
        enter = module.register_forward_pre_hook(lambda mine, _: cache.callers.append(mine))
        leave = module.register_forward_hook(lambda *_: (cache.callers.pop(), None)[1])
        hooks += [enter, leave]
    try:
        with unwatched():
            call()
    finally:
        for hook in hooks:
            hook.remove()
        cache.callers.clear()
    found = set(cache.touched)
    inner = {child for module in found for child in module.modules() if child is not module}
    if decoder in found or not found:
        raise Unsupported("keeps states outside of its layers")
    for module in found - inner:
        cache.split(module)
    return found - inner


def _rehearsed(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> tuple[Tensor, None]:
    return query.new_empty(len(query), query.shape[2], query.shape[1], value.shape[3]), None


def _any_mask(**_: object) -> EveryToken:
    return EVERY_TOKEN


AttentionInterface.register(REHEARSAL, _rehearsed)
AttentionMaskInterface.register(REHEARSAL, _any_mask)
