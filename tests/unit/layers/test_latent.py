"""Latent attention in its absorbed form, beside keys and values that are expanded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tools.paged_run import CPU, make_metadata
from tgi_cli.attention import PagedAttention, create_attention
from tgi_cli.device.distributed import Shard
from tgi_cli.layers import Build, Loadable
from tgi_cli.layers.latent import LatentAttention, LatentExpansion
from tgi_cli.quantization import Unquantized

HIDDEN = 64
SIZES: dict[str, Any] = {
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "q_lora_rank": 32,
}


def filled(module: torch.nn.Module, path: str = "attention") -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    for name, layer in module.named_modules():
        if isinstance(layer, Loadable):
            layer.materialize(CPU)
            for slot in layer.slots(f"{path}.{name}"):
                slot.fill(torch.randn(slot.shape, generator=generator) / slot.shape[-1] ** 0.5)
            layer.finish()
    return module


def attention_of(layer: LatentAttention, backend: str, dtype: torch.dtype) -> PagedAttention:
    attention = create_attention(backend, [layer.kv_spec], 16, dtype, CPU)
    attention.allocate(64)
    for cache in attention.key_cache:
        cache.fill_(float("nan"))
    return attention


def rotation(positions: list[int], dims: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.tensor(positions)[:, None] / 10000 ** (torch.arange(dims // 2) / (dims // 2))
    cos, sin = angles.cos(), angles.sin()
    return (
        torch.cat((cos, cos), -1)[:, None].to(dtype),
        torch.cat((-sin, sin), -1)[:, None].to(dtype),
    )


class Run:
    """Sequences of hidden states through one layer, in steps of any composition."""

    def __init__(self, layer: LatentAttention, backend: str, dtype: torch.dtype) -> None:
        self.layer, self.dtype = layer, dtype
        self.attention = attention_of(layer, backend, dtype)
        self.lens: dict[int, int] = {}

    def step(self, parts: dict[int, Tensor]) -> dict[int, Tensor]:
        order = sorted(parts, key=lambda name: len(parts[name]) != 1)
        query_lens = [len(parts[name]) for name in order]
        before = [self.lens.get(name, 0) for name in order]
        self.lens |= {n: b + q for n, b, q in zip(order, before, query_lens, strict=True)}
        kv_lens = [self.lens[name] for name in order]
        tables = [
            [name * 16 + block for block in range(-(-self.lens[name] // 16))] for name in order
        ]
        self.attention.plan(make_metadata(tables, query_lens, kv_lens, 16))
        positions = [p for b, k in zip(before, kv_lens, strict=True) for p in range(b, k)]
        angles = rotation(positions, self.layer.rope_dim, self.dtype)
        with torch.inference_mode():
            output = self.layer(torch.cat([parts[n] for n in order]), angles, self.attention)
        return dict(zip(order, output.split(query_lens), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [2, 5, 16])
def test_a_token_is_the_same_to_the_last_bit_in_any_company(heads: int, dtype: torch.dtype) -> None:
    layer = filled(LatentAttention(Build(dtype, Unquantized()), 0, HIDDEN, heads, **SIZES))
    assert isinstance(layer, LatentAttention)
    texts = {n: torch.randn(size, HIDDEN).to(dtype) for n, size in ((0, 90), (1, 61), (2, 17))}
    alone: dict[int, Tensor] = {}
    for name, text in texts.items():
        alone |= Run(layer, "cpu", dtype).step({name: text})
    run = Run(layer, "cpu", dtype)
    rest, got = dict(texts), {name: [] for name in texts}
    sizes = iter((1, 7, 24, 3, 16, 1, 1, 40, 5) * 20)
    while any(len(text) for text in rest.values()):
        step = {}
        for name, text in rest.items():
            size = next(sizes)
            if len(text):
                step[name], rest[name] = text[:size], text[size:]
        for name, output in run.step(step).items():
            got[name].append(output)
    for name in texts:
        assert torch.equal(torch.cat(got[name]), alone[name])


def test_backends_agree_with_keys_and_values_that_are_expanded() -> None:
    layer = filled(LatentAttention(Build(torch.float32, Unquantized()), 0, HIDDEN, 4, **SIZES))
    assert isinstance(layer, LatentAttention)
    text = torch.randn(70, HIDDEN)
    wanted = expanded(layer, text)
    for backend in ("torch", "cpu"):
        got = Run(layer, backend, torch.float32).step({0: text})[0]
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def expanded(layer: LatentAttention, hidden: Tensor) -> Tensor:
    """The layer's formula with a key and a value for each head."""
    assert layer.q_a_layernorm is not None
    with torch.inference_mode():
        short, row = layer.qkv_a_proj(hidden).split((32, 56), 1)
        query = layer.q_b_proj(layer.q_a_layernorm(short)).view(len(hidden), 4, 24)
        latent = layer.kv_a_layernorm(row[:, :48])
        keys = torch.einsum("tr,hkr->thk", latent, layer.kv_b_proj.keys)
        values = torch.einsum("tr,hrv->thv", latent, layer.kv_b_proj.values)
        cos, sin = rotation(list(range(len(hidden))), 8, torch.float32)

        def rotated(x: Tensor) -> Tensor:
            return x * cos + x.roll(4, -1) * sin

        scores = torch.einsum("thk,shk->hts", query[..., :16], keys)
        scores += torch.einsum(
            "thk,sk->hts", rotated(query[..., 16:]), rotated(row[:, None, 48:])[:, 0]
        )
        hidden_keys = torch.ones(len(hidden), len(hidden), dtype=torch.bool).triu(1)
        weights = (scores / 24**0.5).masked_fill(hidden_keys, float("-inf")).softmax(-1)
        output: Tensor = layer.o_proj(torch.einsum("hts,shv->thv", weights, values).flatten(1))
        return output


def test_a_token_is_cached_as_one_row_on_every_shard() -> None:
    for size in (1, 2):
        build = Build(torch.float32, Unquantized(), Shard(0, size))
        layer = LatentAttention(build, 0, HIDDEN, 4, **SIZES)
        attention = attention_of(layer, "cpu", torch.float32)
        assert attention.block_bytes == 16 * (48 + 8) * 4
        keys, values = attention.key_cache[0], attention.value_cache[0]
        assert keys.shape[2:] == (1, 56)
        assert values.data_ptr() == keys.data_ptr()
        assert layer.num_heads == 4 // size


def test_each_shard_has_the_matrices_of_its_heads() -> None:
    weight = torch.arange(4 * 36 * 48.0).view(4 * 36, 48)
    whole = LatentExpansion(Build(torch.float32, Unquantized()), 4, 48, 16, 20)
    half = LatentExpansion(Build(torch.float32, Unquantized(), Shard(1, 2)), 4, 48, 16, 20)
    for each in (whole, half):
        each.materialize(CPU)
        (slot,) = each.slots("kv_b_proj")
        slot.fill(weight)
    assert torch.equal(whole.keys[2:], half.keys)
    assert torch.equal(whole.values[2:], half.values)
    assert torch.equal(whole.keys[1, 3], weight[36 + 3])
    assert torch.equal(whole.values[1, :, 3], weight[36 + 16 + 3])


def test_packed_matrices_count_as_weights() -> None:
    layer = LatentExpansion(Build(torch.bfloat16, Unquantized()), 4, 48, 16, 32)
    filled(layer)
    numbers = 4 * 48 * (16 + 32)
    parameters = sum(parameter.nbytes for parameter in layer.parameters())
    assert numbers * 2 <= layer.packed_bytes + parameters < numbers * 4
