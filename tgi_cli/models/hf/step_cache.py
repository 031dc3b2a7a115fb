"""What transformers' modules take as their cache: the states of a step, and its positions.

Modules that keep a recurrent state run over the flat batch in one of two ways.

- Most are built from five functions: a convolution, the gated delta rule, Kimi's, and the scans of
  Mamba and Mamba-2. Ours take their place in the forward of each module; they carry each
  sequence's state from its slot, token by token (:mod:`tgi_cli.layers.recurrent`).
- Others are called sequence by sequence (:mod:`tgi_cli.models.hf.split`).
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tgi_cli.attention import StateCache, StateSpec, StateTensor
from tgi_cli.layers import recurrent
from tgi_cli.layers.gates import GivenGates, StepSizes
from tgi_cli.models.hf.arguments import LENGTH_NAMES, parameters_of
from tgi_cli.models.hf.attention import AttentionContext
from tgi_cli.models.hf.masks import Unsupported
from tgi_cli.models.hf.own_attention import stand_ins


class _Positions:
    indexer_position_ids: Tensor | None = None

    def __getitem__(self, layer: int) -> _Positions:
        return self


class StepCache:
    """The states of a step's sequences, for modules that compute with the functions below.

    Attributes:
        specs: specifications of the states, in the order in which a dry run met them.
        positions: int64 [T], of the step's tokens.
        offsets: int64 [T], what is to be added to 0, 1, 2... to get the tokens' positions.
        counted: whether ``offsets`` were asked for.
    """

    is_compileable = False
    is_initialized = True

    def __init__(self) -> None:
        self.specs: list[StateSpec] = []
        self.positions: Any = None
        self.offsets: Any = 0
        self.counted = False
        self._indices: dict[tuple[tuple[int, int], str, int], int] = {}
        self._at = (0, 0)
        self._calls: Counter[tuple[tuple[int, int], str]] = Counter()
        self._states: StateCache | None = None
        self._attention: AttentionContext | None = None

    def attend_itself(self, attention: AttentionContext) -> None:
        """From now on give stand-ins of keys and values to the code that asks for them."""
        self._attention = attention

    def begin(self, positions: Tensor, states: StateCache | None) -> None:
        """Set the positions of the step's tokens, int64 [T], and the slots of its sequences."""
        self.positions = positions
        self.offsets = torch.empty_like(positions)  # in a dry run
        if not positions.is_meta:
            self.offsets = positions - torch.arange(len(positions), device=positions.device)
        self._states = states
        self._calls.clear()

    @property
    def states(self) -> StateCache:
        """The slots of the step that is running, which is no dry run."""
        assert self._states is not None
        return self._states

    def enter(self, layer: int) -> None:
        """What asks for states from now on is the layer of this number."""
        self._at = (layer, 0)

    # What attention asks for: keys and values are kept elsewhere.

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Any, Any]:
        if self._attention is None:
            return key, value
        return stand_ins(self._attention, layer_idx, key, value)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        self.counted = True
        return self.offsets

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        self.counted = True
        return self.offsets

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    @property
    def is_sliding(self) -> list[bool]:
        """Of no layer: the offsets and sizes of all are the same."""
        return []

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def layers(self) -> _Positions:
        """Where Qwen 4 looks for the positions of earlier tokens, which its indexers need."""
        return _Positions()

    # What modules with a state ask for. They get none, and so compute as at a text's beginning.

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def has_previous_state(self, *_: object, **__: object) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self._at = (layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self._at = (layer_idx, state_idx)

    def update_conv_state(
        self,
        x: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: object,
    ) -> Tensor:
        self._at = (layer_idx, state_idx)
        return x

    def update_recurrent_state(
        self, state: Tensor, layer_idx: int = 0, state_idx: int = 0, **_: object
    ) -> Tensor:
        return state

    # The functions.

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: object,
    ) -> Tensor:
        """[1, channels, T] of a depthwise causal convolution with ``weight`` [channels, taps]."""
        if activation not in (None, "silu", "swish"):
            raise Unsupported(f"has a convolution with activation {activation!r}")
        index = self.state_index("conv", (weight.shape[-1] - 1, x.shape[1]), x.dtype)
        if x.is_meta:
            return torch.empty_like(x)
        assert self._states is not None
        y = recurrent.causal_conv(
            x[0].T,
            weight.T.float().contiguous(),
            None if bias is None else bias.float(),
            activation,
            self._states,
            index,
        )
        return y.T[None]

    def delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *_: object,
        use_qk_l2norm_in_kernel: bool = False,
        **__: object,
    ) -> tuple[Tensor, Tensor]:
        """[1, T, heads, value_dim] of the gated delta rule; no state is returned.

        ``g`` is the logarithm of decays, [1, T, heads] or [1, T, heads, key_dim].
        """
        if not use_qk_l2norm_in_kernel:
            raise Unsupported("has a delta rule of keys of any length")
        size = (value.shape[2], key.shape[3], value.shape[3])
        index = self.state_index("recurrent", size, torch.float32)
        if value.is_meta:
            return torch.empty_like(value), value.new_empty(0)
        assert self._states is not None
        gates = GivenGates(value.shape[2], channels=g.ndim == 4)
        qkv = (query[0], key[0], value[0])
        given = (g[0].flatten(1).float(), beta[0].float())
        y = recurrent.gated_delta(qkv, *given, gates, self._states, index)
        return y[None], value.new_empty(0)

    def state_space(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *_: object,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **__: object,
    ) -> Any:
        """[1, T, heads, head_dim] of Mamba-2; with ``return_final_states`` and no state."""
        if D is None or dt_bias is None or z is not None or not dt_softplus:
            raise Unsupported("has a state space model of another form")
        size = (x.shape[2], B.shape[3], x.shape[3])
        index = self.state_index("recurrent", size, torch.float32)
        if x.is_meta:
            y = torch.empty_like(x)
        else:
            assert self._states is not None
            sizes = StepSizes(-A.float(), dt_bias.float(), D.float(), *dt_limit)
            parts = (x[0], B[0], C[0], dt[0])
            y = recurrent.state_space(*parts, sizes, self._states, index)[None]
        return (y, x.new_empty(0)) if return_final_states else y

    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **_: object,
    ) -> Any:
        """[1, channels, T] of Mamba; with ``return_last_state`` and no state.

        ``x``, ``dt`` and ``z`` are [1, channels, T], ``A`` [channels, n], ``B``, ``C`` [1, n, T].
        """
        index = self.state_index("recurrent", tuple(A.shape), torch.float32)
        y = torch.empty_like(x)
        if not x.is_meta:
            assert self._states is not None
            if delta_bias is not None:
                dt = dt + delta_bias[:, None]
            step = (F.softplus(dt) if delta_softplus else dt)[0].float().T
            given = (x[0].float().T, step, A.float(), B[0].float().T, C[0].float().T)
            y = recurrent.selective_scan(*given, self._states, index)
            y = y.T[None].to(x.dtype)
            if D is not None:
                y = y + x * D[:, None]
            if z is not None:
                y = y * F.silu(z)
        return (y, x.new_empty(0)) if return_last_state else y

    def state_index(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """The index of the state of this call in a step; a dry run makes them.

        A module may call a function several times, for parts that have a state each.
        """
        at = (self._at, name)
        call = (*at, self._calls[at])
        self._calls[at] += 1
        spec = StateSpec((StateTensor(name, shape, dtype),))
        if self._states is None and call not in self._indices:
            self._indices[call] = len(self.specs)
            self.specs.append(spec)
        index = self._indices[call]
        if self._states is None and self.specs[index] != spec:
            raise Unsupported("keeps states of several sizes in one place")
        return index


def _ours(cache: StepCache) -> dict[str, Callable[..., Any]]:
    """The functions by the names that transformers' modelling code has for them."""
    return {
        "causal_conv1d_fn": cache.causal_conv,
        "torch_chunk_gated_delta_rule": cache.delta_rule,
        "chunk_kimi_delta_attention": cache.delta_rule,
        "mamba2_chunk_scan": cache.state_space,
        "mamba_selective_scan": cache.selective_scan,
    }


def substitute(decoder: nn.Module, cache: StepCache) -> set[nn.Module]:
    """Give the modules of ``decoder`` our functions; returns those that use any.

    Only these modules get them: their forward is bound again, with other globals.
    """
    ours, found = _ours(cache), set()
    for module in decoder.modules():
        forward = inspect.unwrap(type(module).forward)
        if not isinstance(forward, FunctionType) or not ours.keys() & set(
            forward.__code__.co_names
        ):
            continue
        if not forward.__module__.startswith("transformers."):
            continue  # functions of these names may compute anything there
        rebind(module, {k: f for k, f in ours.items() if k in forward.__globals__})
        found.add(module)
    return found


def rebind(module: nn.Module, names: dict[str, Callable[..., Any]]) -> None:
    """Let the forward of a module call these functions by the names that its code has for them."""
    forward = inspect.unwrap(type(module).forward)
    assert isinstance(forward, FunctionType)
    mine = FunctionType(
        forward.__code__,
        forward.__globals__ | names,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    mine.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(mine, module)


def give_positions(decoder: nn.Module, cache: StepCache | None) -> None:
    """Tell the positions to embeddings that would count tokens from the cache's length on.

    ``cache`` is None for a decoder that is told them: its embeddings are, too.
    """
    for module in decoder.modules():
        names = list(parameters_of(type(module).forward))[1:]
        if names[:1] == ["position_ids"] and names[1:] in ([name] for name in LENGTH_NAMES):
            module.forward = MethodType(_looked_up, module)
        elif cache is None and hasattr(module, "make_weights") and "position_ids" in names:
            module.forward = MethodType(_rows, module)
        if cache is not None and names[1:3] in ([name, "position_ids"] for name in LENGTH_NAMES):
            module.forward = MethodType(_told(type(module).forward, cache), module)


def _told(forward: Callable[..., Any], cache: StepCache) -> Callable[..., Any]:
    def told(module: nn.Module, ids_or_shape: Any, *_: object, **__: object) -> Any:
        return forward(module, ids_or_shape, position_ids=cache.positions)

    return told


def _looked_up(module: Any, positions: Tensor, *_: object, **__: object) -> Tensor:
    """XGLM's sinusoids, which would grow its table with the tokens of a step."""
    rows: Tensor = module.weights.index_select(0, (positions + module.offset).flatten())
    return rows.view(*positions.shape, -1)


def _rows(module: Any, *_: object, position_ids: Tensor, **__: object) -> Tensor:
    """Sinusoids of a table that would grow with the tokens of a step."""
    rows: Tensor = module.weights.index_select(0, position_ids.flatten())
    return rows.view(*position_ids.shape, -1)
