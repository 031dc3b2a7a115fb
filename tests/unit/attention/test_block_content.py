"""Blocks that are copied out of the caches of CPUs, and into them."""

from __future__ import annotations

import pytest
import torch

from tgi_cli.attention import PagedAttention, create_attention
from tgi_cli.attention.spec import KVSpec
from tgi_cli.kernels import cpp_library

SPECS = (KVSpec(2, 32), KVSpec(1, 48, value_dim=16, values_in_keys=True))


def attention(kind: str, cache_dtype: torch.dtype) -> PagedAttention:
    dtype = torch.bfloat16 if kind == "native" else torch.float32
    cache = dtype if cache_dtype == torch.float32 else cache_dtype
    made = create_attention(kind, SPECS, 16, dtype, torch.device("cpu"), cache)
    made.allocate(5)
    return made


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", ["native", "cpu", "torch"])
def test_a_block_is_copied_whole_and_alone(kind: str, cache_dtype: torch.dtype) -> None:
    if kind == "native" and cpp_library() is None:
        pytest.skip("the kernels are not compiled")
    source, target = attention(kind, cache_dtype), attention(kind, cache_dtype)
    for layer, spec in enumerate(SPECS):
        keys = torch.randn(80, spec.num_kv_heads, spec.head_dim).to(source.dtype)
        values = torch.randn(80, spec.num_kv_heads, spec.value_width).to(source.dtype)
        own = None if spec.values_in_keys else values
        source.write(layer, keys, own, torch.arange(80))
    contents = {block: source.export_block(block) for block in (1, 3)}
    assert all(len(content) == source.block_bytes for content in contents.values())
    target.import_blocks([(4, contents[1]), (0, contents[3])])
    assert target.export_block(4) == contents[1]
    assert target.export_block(0) == contents[3]
    for block in (1, 2, 3):
        assert not any(target.export_block(block))
    for mine, theirs in zip(source.stored, target.stored, strict=True):
        assert torch.equal(mine[1].view(torch.uint8), theirs[4].view(torch.uint8))
