"""Products of torch's in bfloat16 are computed in float32 where those in bfloat16 are slow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.tools.torch_products import BFloat16Products
from tgi_cli.models.hf import float32_products as module
from tgi_cli.models.hf.float32_products import float32_products

CPU = torch.device("cpu")


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def made(layer: nn.Module) -> nn.Module:
    for index, parameter in enumerate(layer.parameters()):
        parameter.data = numbers(*parameter.shape) / (8 + index)
    return layer.eval()


x = numbers(24, 24)
PRODUCTS: dict[str, Callable[[], Tensor]] = {
    "conv1d": lambda: made(nn.Conv1d(24, 8, 3, groups=4, padding=1))(x),
    "conv2d": lambda: made(nn.Conv2d(3, 8, 4, 4))(numbers(1, 3, 16, 16)),
    "conv2d, padded": lambda: made(
        nn.Conv2d(3, 3, 3, padding=1, groups=3, padding_mode="replicate")
    )(numbers(1, 3, 16, 16)),
    "conv3d": lambda: made(nn.Conv3d(3, 8, 4, 4))(numbers(2, 3, 4, 4, 4)),
    "transposed": lambda: made(nn.ConvTranspose2d(4, 4, 2, 2))(numbers(1, 4, 6, 6)),
    "linear": lambda: made(nn.Linear(24, 24))(x),
    "@": lambda: x @ x,
    "matmul": lambda: x.matmul(x),
    "mm": lambda: torch.mm(x, x),
    "bmm": lambda: torch.bmm(x[None], x[None]),
    "addmm": lambda: torch.addmm(x, x, x),
    "baddbmm": lambda: x[None].baddbmm(x[None], x[None], alpha=0.5),
    "einsum": lambda: torch.einsum("ij,kj->ik", x, x),
    "einsum of a list": lambda: torch.einsum("ij,kj->ik", [x, x]),
    "attention": lambda: made(nn.MultiheadAttention(24, 2, batch_first=True))(
        x[None, :1], x[None], x[None]
    )[0],
}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor on which torch has no fast products in bfloat16."""
    monkeypatch.setattr(module, "ONEDNN_DTYPES", frozenset({torch.float32}))


@pytest.mark.usefixtures("slow")
@torch.inference_mode()
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_rounded_once(name: str) -> None:
    product = PRODUCTS[name]
    with BFloat16Products() as plain:
        product()
    assert plain.found, "torch would compute it in bfloat16"
    with BFloat16Products() as wide, float32_products(torch.bfloat16, CPU):
        found = product()
    assert not wide.found
    assert found.dtype == torch.bfloat16
    assert found.isfinite().all()
    assert torch.allclose(found.float(), product().float(), rtol=2**-6, atol=2**-6)


@pytest.mark.usefixtures("slow")
def test_other_operations_and_dtypes_are_left_alone() -> None:
    with float32_products(torch.bfloat16, CPU):
        assert F.gelu(x).dtype == torch.bfloat16
        assert (x.double() @ x.double()).dtype == torch.float64
        assert torch.equal(x.float() @ x.float(), torch.mm(x.float(), x.float()))


@pytest.mark.parametrize(
    ("dtype", "dtypes"),
    [
        (torch.bfloat16, frozenset({torch.float32, torch.bfloat16})),
        (torch.float32, frozenset({torch.float32})),
    ],
)
def test_it_costs_nothing_where_products_are_fast(
    dtype: torch.dtype, dtypes: frozenset[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ONEDNN_DTYPES", dtypes)
    with BFloat16Products() as seen, float32_products(dtype, CPU):
        x @ x
    assert seen.found
