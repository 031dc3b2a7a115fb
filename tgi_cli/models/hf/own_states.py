"""Recurrent layers of transformers' models that keep their states in places of their own.

RecurrentGemma keeps them in its modules, RWKV and xLSTM in lists that their models pass on. Their
recurrences are replaced by the functions below, token by token and in float32, over the states of a
step's slots. What surrounds the recurrences is transformers'.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tgi_cli.attention import StateCache
from tgi_cli.models.hf.masks import Unsupported
from tgi_cli.models.hf.step_cache import StepCache

TYPES = ("recurrent_gemma", "rwkv", "xlstm")
"""Model types of which a module is replaced here."""

_NOTHING = -1e38
"""Logarithm of the weight of no token."""


def replace_own_states(decoder: nn.Module, cache: StepCache) -> set[nn.Module]:
    """Let the recurrent layers of a model of :data:`TYPES` keep their states in ``cache``.

    Returns them.

    Raises:
        Unsupported: its code is another library's.
    """
    replacements: dict[str, Callable[..., Any]] = {
        "RecurrentGemmaRecurrentBlock": _recurrent_block,
        "RwkvSelfAttention": _time_mix,
        "RwkvFeedForward": _channel_mix,
        "xLSTMBackend": _matrix_memory,
    }
    found: set[nn.Module] = set()
    for module in decoder.modules():
        forward = replacements.get(type(module).__name__)
        if forward is not None and type(module).__module__.startswith("transformers.models."):
            module.forward = MethodType(_bound(forward, cache, len(found)), module)
            found.add(module)
    if not found:
        raise Unsupported("keeps a state beside keys and values, in a way of its own")
    model: Any = decoder
    if hasattr(model, "layers_are_rescaled"):
        model.layers_are_rescaled = True  # by _time_mix and _channel_mix, and not in the weights
    if hasattr(model.config, "max_inference_chunksize"):
        model.config.max_inference_chunksize = sys.maxsize  # else longer steps lose their states
    return found


def _bound(forward: Callable[..., Any], cache: StepCache, layer: int) -> Callable[..., Any]:
    def enter(module: Any, *args: Any, **kwargs: Any) -> Any:
        cache.enter(layer)
        return forward(cache, module, *args, **kwargs)

    return enter


def _recurrent_block(
    cache: StepCache, block: Any, /, inputs: Tensor, position_ids: Tensor, *_: object, **__: object
) -> tuple[Tensor, None]:
    """Griffin's block of a convolution and a gated linear recurrence (RG-LRU).

    https://arxiv.org/abs/2402.19427, section 2.4.
    """
    gate = block.act_fn(block.linear_y(inputs))
    convolution, unit = block.conv_1d, block.rg_lru
    x = cache.causal_conv(
        block.linear_x(inputs).transpose(1, 2), convolution.weight[:, 0], convolution.bias
    ).transpose(1, 2)
    tokens, width = x.shape[1:]
    heads = x.reshape(tokens, unit.num_attention_heads, -1).transpose(0, 1)

    def gates(weight: Tensor, bias: Tensor) -> Tensor:
        made = torch.baddbmm(bias[:, None], heads, weight)
        return torch.sigmoid(made.transpose(0, 1).reshape(1, tokens, width))

    inner = gates(unit.input_gate_weight, unit.input_gate_bias)
    recurrent = gates(unit.recurrent_gate_weight, unit.recurrent_gate_bias)
    log_decay = -8.0 * recurrent * F.softplus(unit.recurrent_param)
    fresh = (position_ids == 0)[..., None]
    decay = torch.exp(log_decay).masked_fill(fresh, 0.0)
    share = torch.sqrt(1 - torch.exp(2 * log_decay)).masked_fill(fresh, 1.0)
    scaled = x * inner * share.to(x.dtype)
    index = cache.state_index("recurrent", (width,), torch.float32)
    if x.is_meta:
        return block.linear_out(scaled * gate), None
    hidden = linear_recurrence(decay[0].float(), scaled[0].float(), cache.states, index)
    return block.linear_out(hidden[None].to(x.dtype) * gate), None


def linear_recurrence(decay: Tensor, x: Tensor, states: StateCache, layer: int) -> Tensor:
    """h = decay * h + x over the tokens of each sequence, float32 [T, channels] each.

    ``states`` has h [channels] of each sequence as ``recurrent``.
    """
    output = torch.empty_like(x)

    def run(tokens: slice, state: Tensor) -> None:
        for t in range(tokens.start, tokens.stop):
            state.mul_(decay[t]).add_(x[t])
            output[t] = state

    states.advance(layer, "recurrent", run)
    return output


def _before(cache: StepCache, hidden: Tensor) -> Tensor:
    """[1, T, channels]: of the token before; zeros at a text's beginning."""
    taps = torch.tensor([1.0, 0.0], device=hidden.device).expand(hidden.shape[-1], 2)
    return cache.causal_conv(hidden.transpose(1, 2), taps).transpose(1, 2)


def _mixed(hidden: Tensor, before: Tensor, share: Tensor) -> Tensor:
    return hidden * share + before * (1 - share)


def _scale(layer: Any) -> float:
    """What transformers multiplies outputs by, so that float16 holds their sums."""
    every = layer.config.rescale_every
    return 0.5 ** (layer.layer_id // every) if every > 0 else 1.0


def _time_mix(
    cache: StepCache, layer: Any, /, hidden: Tensor, state: object = None, **_: object
) -> tuple[Tensor, None]:
    """RWKV-4's attention (https://arxiv.org/abs/2305.13048, section 3.1)."""
    before = _before(cache, hidden)
    key = layer.key(_mixed(hidden, before, layer.time_mix_key))
    value = layer.value(_mixed(hidden, before, layer.time_mix_value))
    gate = torch.sigmoid(layer.receptance(_mixed(hidden, before, layer.time_mix_receptance)))
    index = cache.state_index("recurrent", (3, key.shape[-1]), torch.float32)
    if hidden.is_meta:
        return layer.output(gate * value), None
    rates = (-torch.exp(layer.time_decay.float()), layer.time_first.float())
    mixed = weighted_mean(key[0].float(), value[0].float(), rates, cache.states, index)
    output: Tensor = layer.output(gate * mixed[None].to(value.dtype))
    return output.mul_(_scale(layer)), None


def _channel_mix(
    cache: StepCache, layer: Any, /, hidden: Tensor, state: object = None
) -> tuple[Tensor, None]:
    """RWKV-4's feed-forward block."""
    before = _before(cache, hidden)
    key = torch.square(torch.relu(layer.key(_mixed(hidden, before, layer.time_mix_key))))
    gate = torch.sigmoid(layer.receptance(_mixed(hidden, before, layer.time_mix_receptance)))
    return gate * (layer.value(key) * _scale(layer)), None


def weighted_mean(
    key: Tensor, value: Tensor, rates: tuple[Tensor, Tensor], states: StateCache, layer: int
) -> Tensor:
    """The mean of a channel's values so far, weighted by exp of their keys, which fall with time.

    Per channel, with ``rates`` (w, u): a token's weight is exp(key + u) for itself, and for the
    token n after it exp(key + (n - 1) w). Numerators and denominators are kept divided by the
    greatest weight, whose logarithm is kept, too.

    Args:
        key, value: float32 [T, channels].
        rates: float32 [channels] each.
        states: has [3, channels] of each sequence as ``recurrent``.
        layer: index of its states.

    Returns:
        float32 [T, channels]
    """
    decay, bonus = rates
    output = torch.empty_like(value)

    def run(tokens: slice, state: Tensor) -> None:
        sums, most = state[:2], state[2]
        most.masked_fill_(sums[1] == 0, _NOTHING)  # of a fresh state, all of it zeros
        for t in range(tokens.start, tokens.stop):
            here = torch.stack((value[t], torch.ones_like(value[t])))
            greatest = torch.maximum(most, key[t] + bonus)
            seen = sums * torch.exp(most - greatest) + here * torch.exp(key[t] + bonus - greatest)
            torch.div(seen[0], seen[1], out=output[t])
            greatest = torch.maximum(most + decay, key[t])
            sums.mul_(torch.exp(most + decay - greatest)).add_(here * torch.exp(key[t] - greatest))
            most.copy_(greatest)

    states.advance(layer, "recurrent", run)
    return output


def _matrix_memory(
    cache: StepCache,
    backend: Any,
    /,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    igate: Tensor,
    fgate: Tensor,
    **_: object,
) -> tuple[Tensor, tuple[()]]:
    """xLSTM's mLSTM: [1, heads, T, ·], gates [1, heads, T], to [1, heads, T, value_dim]."""
    heads, width = key.shape[1], (key.shape[3], value.shape[3])
    index = cache.state_index("recurrent", (heads, width[0], width[1] + 2), torch.float32)
    if value.is_meta:
        return torch.empty_like(value), ()
    qkv = [x[0].transpose(0, 1).float() for x in (query, key, value)]
    gates = [gate[0].T.float() for gate in (igate, fgate)]
    output = matrix_memory(
        (qkv[0], qkv[1], qkv[2]), (gates[0], gates[1]), backend.config.eps, cache.states, index
    )
    return output.transpose(0, 1)[None].to(value.dtype), ()


def matrix_memory(
    qkv: tuple[Tensor, Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    eps: float,
    states: StateCache,
    layer: int,
) -> Tensor:
    """An mLSTM over the tokens of each sequence, in its recurrent form.

    Per head a matrix C and a vector n: ``C = f C + i k v^T; n = f n + i k;
    h = C^T q / max(|n^T q|, 1)``, with f = sigmoid(forget gate), i = exp(input gate), and queries
    divided by the root of key_dim. C and n are kept divided by exp(m), so that they stay finite.
    https://arxiv.org/abs/2405.04517, section 2.3 and appendix A.3.

    Args:
        qkv: float32 [T, heads, key_dim] twice, and [T, heads, value_dim].
        gates: of input and forgetting before their activations, float32 [T, heads].
        eps: added to the denominator.
        states: has [heads, key_dim, value_dim + 2] of each sequence as ``recurrent``: C, n, and m
            in the first row of the last column.
        layer: index of its states.

    Returns:
        float32 [T, heads, value_dim]
    """
    query, key, value = qkv
    enter, forget = gates[0], F.logsigmoid(gates[1])
    query = query / math.sqrt(query.shape[-1])
    output = torch.empty_like(value)
    size = value.shape[-1]

    def run(tokens: slice, state: Tensor) -> None:
        memory, most = state[..., : size + 1], state[:, 0, size + 1]
        one = torch.ones_like(value[0, :, :1])
        for t in range(tokens.start, tokens.stop):
            greatest = torch.maximum(forget[t] + most, enter[t])
            memory.mul_(torch.exp(forget[t] + most - greatest)[:, None, None])
            weighted = key[t] * torch.exp(enter[t] - greatest)[:, None]
            memory.addcmul_(weighted[..., None], torch.cat((value[t], one), -1)[:, None])
            seen = (memory * query[t, :, :, None]).sum(1)
            lowest = torch.exp(-greatest)[:, None]
            output[t] = seen[:, :size] / (torch.maximum(seen[:, size:].abs(), lowest) + eps)
            most.copy_(greatest)

    states.advance(layer, "recurrent", run)
    return output
