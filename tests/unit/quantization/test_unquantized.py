from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from tgi_cli.kernels import cpp_library, without_cpp_kernels
from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.layers import Build, ColumnParallelLinear, LMHead, Projection
from tgi_cli.layers.embedding import Embedding
from tgi_cli.quantization import Unquantized, unquantized

CPU = torch.device("cpu")


def make(
    dtype: torch.dtype, bias: bool = True
) -> tuple[ColumnParallelLinear, torch.Tensor, torch.Tensor]:
    """A filled layer of two parts, and the weight and bias it was filled with."""
    layer = ColumnParallelLinear(
        Build(dtype, Unquantized()), 48, {"gate": Projection(40), "up": Projection(24)}, bias
    )
    weight, bias_values = torch.randn(64, 48).to(dtype), torch.randn(64).to(dtype)
    tensors = {
        "mlp.gate.weight": weight[:40],
        "mlp.up.weight": weight[40:],
        "mlp.gate.bias": bias_values[:40],
        "mlp.up.bias": bias_values[40:],
    }
    layer.materialize(CPU)
    for slot in layer.slots("mlp.gate_up"):
        assert slot.shape == tuple(tensors[slot.name].shape)
        slot.fill(tensors[slot.name])
    layer.finish()
    return layer, weight, bias_values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("bias", [True, False])
def test_computes_what_a_plain_linear_computes(dtype: torch.dtype, tokens: int, bias: bool) -> None:
    layer, weight, bias_values = make(dtype, bias)
    x = torch.randn(tokens, 48).to(dtype)
    wanted = linear(x.float(), weight.float(), bias_values.float() if bias else None)
    tolerance = 1e-5 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(layer(x).float(), wanted, atol=tolerance, rtol=0)
    assert layer(x).dtype == dtype


def test_a_packed_weight_replaces_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_cpp_kernels():
        layer, weight, bias = make(torch.bfloat16)
    assert (layer.packed is not None) == (torch.bfloat16 in unquantized.ONEDNN_DTYPES)
    assert (layer.weight is None) == (layer.packed is not None)
    monkeypatch.setattr(unquantized, "ONEDNN_DTYPES", frozenset())
    with without_cpp_kernels():
        plain, weight, bias = make(torch.bfloat16)
    assert plain.packed is None
    assert plain.weight is not None
    x = torch.randn(3, 48).bfloat16()
    assert torch.equal(plain(x), linear(x, weight, bias))


@pytest.mark.skipif(cpp_library() is None, reason="the kernels are not compiled here")
def test_the_kernels_weight_replaces_the_plain_one() -> None:
    layer, weight, bias = make(torch.bfloat16)
    assert isinstance(layer.packed, PackedMatrix)
    assert layer.weight is None
    x = torch.randn(3, 48).bfloat16()
    torch.testing.assert_close(layer(x), linear(x, weight, bias), rtol=2**-7, atol=1e-2)
    single, weight, bias = make(torch.float32)
    assert not isinstance(single.packed, PackedMatrix)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_multiplies_by_the_embedding(dtype: torch.dtype) -> None:
    build = Build(dtype, Unquantized())
    embedding = Embedding(build, 50, 16)
    head = LMHead(build, 16, 50, tied=embedding)
    table = torch.randn(50, 16).to(dtype)
    embedding.materialize(CPU)
    (slot,) = embedding.slots("embed")
    slot.fill(table)
    embedding.finish()
    head.materialize(CPU)
    assert list(head.slots("lm_head")) == []
    head.finish()
    hidden = torch.randn(4, 16).to(dtype)
    logits = head(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, linear(hidden, table).float(), atol=0.05, rtol=0.01)
    assert torch.equal(embedding(torch.tensor([3, 49])), table[[3, 49]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    packed = unquantized.pack_onednn(torch.randn(64, 2048).to(dtype))
    if packed is not None:
        x = torch.randn(5, 2048).to(dtype)
        one = unquantized.onednn_linear(x[:1], packed, None)
        assert one.shape == (1, 64)
        assert torch.equal(one, unquantized.onednn_linear(x[:2], packed, None)[:1])
