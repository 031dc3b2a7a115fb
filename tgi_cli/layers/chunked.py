"""Linear attention over prompts in chunks, by the kernels of fla-core, an optional package.

They compute 64 tokens at once by matrix products
(https://github.com/fla-org/flash-linear-attention). Sums are grouped by chunks, and these begin
where a step does: the last bits of a result depend on where a text is cut into steps, unlike those
of the recurrent form. The kernels also choose among their variants by timing them.
Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tgi_cli.attention import StateMetadata
from tgi_cli.attention.state_chunks import ChunkCall
from tgi_cli.errors import ConfigError
from tgi_cli.layers.gates import DeltaGates, GivenGates, StepSizes
from tgi_cli.process.installation import install_command

NORM_EPS = 1e-6
"""Epsilon of the kernels' L2 norm, added to squares."""

_FUNCTIONS = {
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "chunk_kda": "fla.ops.kda",
    "chunk_simple_gla": "fla.ops.simple_gla",
}

Recurrent = Callable[[slice, StateMetadata], Tensor]
"""Computes some tokens as a step of their own, in the recurrent form."""


@cache
def functions() -> dict[str, Callable[..., Any]]:
    """The functions of fla-core, by name.

    Raises:
        ConfigError: it is not installed, or is of a version without them.
    """
    try:
        return {name: getattr(import_module(path), name) for name, path in _FUNCTIONS.items()}
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"--state-prefill chunked needs the package fla-core ({error})",
            f"{install_command('fla')}, or leave it off",
        ) from error


def gated_delta(
    qkv: tuple[Tensor, Tensor, Tensor],
    a: Tensor,
    b: Tensor,
    gates: DeltaGates | GivenGates,
    states: Tensor,
    step: StateMetadata,
    recurrent: Recurrent,
) -> Tensor:
    """The gated delta rule of a step that has chunks.

    Args:
        qkv, a, b, gates: as of :func:`tgi_cli.layers.recurrent.gated_delta`.
        states: float32 [slots, heads, key_dim, value_dim].
        step: the slots.
        recurrent: for the sequences of few tokens.
    """
    query, key, value = qkv
    log_decay, gain = gates.logarithms(a), gates.gains(b)
    name = "chunk_gated_delta_rule"
    if gates.channels:
        name = "chunk_kda"
        log_decay = log_decay.view(len(a), -1, key.shape[2])

    def call(tokens: slice | Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        output, last = functions()[name](
            q=query[tokens][None],
            k=key[tokens][None],
            v=value[tokens][None],
            g=log_decay[tokens][None],
            beta=gain[tokens][None],
            scale=key.shape[2] ** -0.5,
            use_qk_l2norm_in_kernel=True,
            **options,
        )
        return output[0], last

    return _run(value, states, step, call, recurrent)


def state_space(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    sizes: StepSizes,
    states: Tensor,
    step: StateMetadata,
    recurrent: Recurrent,
) -> Tensor:
    """Mamba-2 of a step that has chunks.

    Args:
        x, b, c, dt, sizes: as of :func:`tgi_cli.layers.recurrent.state_space`.
        states, step, recurrent: as of :func:`gated_delta`.
    """
    shared = x.shape[1] // b.shape[1]
    lengths = sizes.steps(dt)
    log_decay = lengths * -sizes.rate

    def call(tokens: slice | Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        own = x[tokens]
        output, last = functions()["chunk_simple_gla"](
            q=c[tokens].repeat_interleave(shared, 1)[None],
            k=b[tokens].repeat_interleave(shared, 1)[None],
            v=(own * lengths[tokens][..., None]).to(own.dtype)[None],
            g=log_decay[tokens][None],
            scale=1.0,
            **options,
        )
        return (output[0] + own * sizes.skip[:, None]).to(own.dtype), last

    return _run(x, states, step, call, recurrent)


def _run(
    value: Tensor,
    states: Tensor,
    step: StateMetadata,
    call: Callable[[slice | Tensor, dict[str, Any]], tuple[Tensor, Tensor]],
    recurrent: Recurrent,
) -> Tensor:
    chunks = step.chunks()
    assert chunks is not None
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if chunks.few:
        few = slice(0, chunks.few_tokens)
        output[few] = recurrent(few, step.leading(chunks.few))
    for each in chunks.calls:
        options = {
            "initial_state": _initial(states, each),
            "output_final_state": True,
            "cu_seqlens": each.starts,
            "cu_seqlens_cpu": each.starts_host,  # otherwise the host waits for the device
        }
        output[each.tokens], last = call(each.tokens, options)
        states.index_copy_(0, each.slots, last.index_select(0, each.kept).to(states.dtype))
    return output


def _initial(states: Tensor, call: ChunkCall) -> Tensor:
    """[N, heads, key_dim, value_dim]; zeros for fresh ones, whatever an unused slot holds."""
    fresh = (call.slots_in < 0).view(-1, 1, 1, 1)
    return states.index_select(0, call.slots_in.clamp_min(0)).masked_fill_(fresh, 0)
