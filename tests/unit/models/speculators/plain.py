"""Draft heads as their papers define them: over whole sequences, without caches or kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

Tensors = dict[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [n, heads, dims], pairs half of the dimensions apart."""
    dims = x.shape[-1]
    frequencies = theta ** (-torch.arange(0, dims, 2).double() / dims)
    angles = (positions[:, None].double() * frequencies)[:, None]
    cos, sin = angles.cos().float(), angles.sin().float()
    first, second = x[..., : dims // 2], x[..., dims // 2 :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention(
    x: Tensor, positions: Tensor, weights: Tensors, path: str, config: dict[str, Any]
) -> Tensor:
    """Causal attention over pairs [n, width]."""
    head_dim = config["head_dim"]

    def project(name: str) -> Tensor:
        projected = x @ weights[f"{path}.{name}.weight"].T
        if f"{path}.{name}.bias" in weights:
            projected = projected + weights[f"{path}.{name}.bias"]
        return projected.view(len(x), -1, head_dim)

    query, key, value = project("q_proj"), project("k_proj"), project("v_proj")
    if f"{path}.q_norm.weight" in weights:
        eps = config["rms_norm_eps"]
        query = rms_norm(query, weights[f"{path}.q_norm.weight"], eps)
        key = rms_norm(key, weights[f"{path}.k_norm.weight"], eps)
    theta = config["rope_theta"]
    query, key = rotated(query, positions, theta), rotated(key, positions, theta)
    share = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / head_dim**0.5
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    shares = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    attended = torch.einsum("hqk,khd->qhd", shares, value).flatten(1)
    return attended @ weights[f"{path}.o_proj.weight"].T


def mlp(x: Tensor, weights: Tensors, path: str) -> Tensor:
    gate, up = x @ weights[f"{path}.gate_proj.weight"].T, x @ weights[f"{path}.up_proj.weight"].T
    return (silu(gate) * up) @ weights[f"{path}.down_proj.weight"].T


def chain(
    run: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    choose: Callable[[Tensor], tuple[int, float]],
    states: Tensor,
    tokens: list[int],
    count: int,
) -> tuple[list[int], list[float]]:
    """Drafts of a head that is given pairs, each from a pass over all of them.

    Args:
        run: pairs' hidden states [n, H] and tokens [n] to what the output head is given and what
            is fed back.
        choose: of what the output head is given.
        states: [n, H], combined, of positions 0 to n - 1.
        tokens: n + 1 of them.
        count: drafts.
    """
    tokens, drafts, chances = list(tokens), [], []
    for _ in range(count):
        final, fed_back = run(states, torch.tensor(tokens[1:]))
        draft, chance = choose(final[-1])
        drafts.append(draft)
        chances.append(chance)
        states, tokens = torch.cat((states, fed_back[-1:])), [*tokens, draft]
    return drafts, chances


class PlainEagle3:
    """An EAGLE-3 head of these tensors.

    Args:
        tensors: of the checkpoint.
        config: of the layer.
        embedding: the target's.
        flags: options that are on.
    """

    def __init__(
        self, tensors: Tensors, config: dict[str, Any], embedding: Tensor, *flags: str
    ) -> None:
        self.weights = {
            name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()
        }
        self.config, self.eps, self.flags = config, config["rms_norm_eps"], flags
        self.embedding = self.weights.get("embed_tokens.weight", embedding)

    def combine(self, states: Tensor) -> Tensor:
        if "norm_before_fc" in self.flags:
            states = rms_norm(states, self.weights["input_norm.weight"], self.eps)
        if "fc_norm" in self.flags:
            parts = states.chunk(sum(n.startswith("fc_norm.") for n in self.weights), -1)
            states = torch.cat(
                [
                    rms_norm(part, self.weights[f"fc_norm.{index}.weight"], self.eps)
                    for index, part in enumerate(parts)
                ],
                -1,
            )
        return states @ self.weights["fc.weight"].T

    def run(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        def norm(x: Tensor, name: str) -> Tensor:
            return rms_norm(x, self.weights[f"{name}.weight"], self.eps)

        normed = norm(states, "layers.0.hidden_norm")
        both = torch.cat((norm(self.embedding[tokens], "layers.0.input_layernorm"), normed), -1)
        x = normed if "norm_before_residual" in self.flags else states
        positions = torch.arange(len(states))
        x = x + attention(both, positions, self.weights, "layers.0.self_attn", self.config)
        x = x + mlp(norm(x, "layers.0.post_attention_layernorm"), self.weights, "layers.0.mlp")
        final = norm(x, "norm")
        return final, final if "norm_output" in self.flags else x

    def choose(self, final: Tensor) -> tuple[int, float]:
        shares = (self.weights["lm_head.weight"] @ final).softmax(-1)
        index = int(shares.argmax())
        moved = int(self.weights["d2t"][index]) if "d2t" in self.weights else 0
        return index + moved, float(shares[index])

    def drafts(
        self, states: Tensor, tokens: list[int], count: int
    ) -> tuple[list[int], list[float]]:
        """Behind the last token, given the target's states [n, W] of all tokens but the last."""
        return chain(self.run, self.choose, self.combine(states), tokens, count)


class PlainMTP:
    """An MTP layer.

    Args:
        tensors: of the layer, without the prefix.
        eps: of its norms.
        names: of the norms of token and state, and of the projection.
        tables: the target's vectors of tokens, and its output head.
        block: the decoder layer, [n, H] to its output behind the output norm, and before it.
        mimo: whether the state comes first, and what is fed back is normed.
    """

    def __init__(
        self,
        tensors: Tensors,
        eps: float,
        names: tuple[str, ...],
        tables: tuple[Tensor, Tensor],
        block: Callable[[Tensor], tuple[Tensor, Tensor]],
        mimo: bool,
    ) -> None:
        self.weights, self.eps, self.names, self.block = tensors, eps, names, block
        self.embedding, self.head = tables
        self.mimo = mimo

    def run(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        token_norm, state_norm, projection = self.names
        token = rms_norm(self.embedding[tokens], self.weights[f"{token_norm}.weight"], self.eps)
        state = rms_norm(states, self.weights[f"{state_norm}.weight"], self.eps)
        both = (state, token) if self.mimo else (token, state)
        final, x = self.block(torch.cat(both, -1) @ self.weights[f"{projection}.weight"].T)
        return final, final if self.mimo else x

    def drafts(
        self, states: Tensor, tokens: list[int], count: int
    ) -> tuple[list[int], list[float]]:
        def choose(final: Tensor) -> tuple[int, float]:
            shares = (self.head @ final).softmax(-1)
            return int(shares.argmax()), float(shares.max())

        return chain(self.run, choose, states, tokens, count)


def medusa(tensors: Tensors, state: Tensor, layers: int, head: Tensor | None, index: int) -> int:
    """The draft of one Medusa head, of tensors named as TGI takes them."""
    for layer in range(layers):
        path = f"{index}.{layer}.linear"
        state = state + silu(tensors[f"{path}.weight"] @ state + tensors[f"{path}.bias"])
    own = tensors[f"{index}.{layers}.weight"] if head is None else head
    return int((own @ state).argmax())


def mlp_speculator(
    tensors: Tensors, config: dict[str, Any], state: Tensor, token: int, count: int
) -> list[int]:
    """The drafts of an MLP speculator."""
    share = 0.5 ** (0.5 / config["n_predict"])
    added = ((1 - share**2) * config["inner_dim"] / 2) ** 0.5
    if config["scale_input"]:
        state = rms_norm(state, torch.ones(len(state)), 1e-6) / 2**0.5
    drafts = []
    for stage in range(count):
        own, projection = (0, min(stage, 1)) if config["tie_weights"] else (stage, stage)
        vector = tensors[f"speculator.emb.{own}.weight"][token]
        state = share * (tensors[f"speculator.proj.{projection}.weight"] @ state) + added * vector
        normed = rms_norm(state, tensors[f"speculator.ln.{own}.weight"], 1e-6)
        state = gelu(normed + tensors[f"speculator.ln.{own}.bias"])
        token = int((tensors[f"speculator.head.{own}.weight"] @ state).argmax())
        drafts.append(token)
    return drafts
