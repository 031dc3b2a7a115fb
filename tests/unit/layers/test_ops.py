from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from tgi_cli import layers
from tgi_cli.layers import ops
from tgi_cli.models.config_fields import ACTIVATIONS

HEADS, DIMS = 6, 32
WIDTHS = (1, 7, 64, 576, 2050)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


def angles(tokens: int, dims: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ours, [T, 1, dims] with the first half's sine negative, then transformers', [1, T, dims]."""
    half = 6.3 * torch.rand(tokens, dims // 2)
    cos, sin = half.cos().to(dtype), half.sin().to(dtype)
    cosines, sines = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    signed = torch.cat((-sin, sin), -1)
    return cosines[:, None], signed[:, None], cosines[None], sines[None]


def close(ours: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(ours, wanted, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("family", "one_plus"),
    [(LlamaRMSNorm, False), (GptOssRMSNorm, False), (Gemma3RMSNorm, True)],
)
def test_rms_norm_is_that_of_transformers(family: Any, one_plus: bool, width: int) -> None:
    theirs = family(width, eps=1e-5)
    theirs.weight.data = torch.randn(width)
    for scale in (1e-4, 1.0, 300.0):
        x = scale * torch.randn(9, width)
        before = x.clone()
        weight = theirs.weight.data + float(one_plus)  # as the layer keeps it
        close(ops.rms_norm(x, weight, 1e-5), theirs(x).detach())
        assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_rounds_once(dtype: torch.dtype) -> None:
    x, weight = torch.randn(9, 576).to(dtype), (0.02 * torch.randn(576)).to(dtype)
    wide = ops.rms_norm(x.float(), weight.float(), 1e-5)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), wide.to(dtype))
    assert torch.equal(ops.rms_norm(x, weight.float(), 1e-5), wide.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_adds_into_the_residual_and_normalizes_the_rounded_sum(dtype: torch.dtype) -> None:
    weight, bias = torch.randn(2, 100).to(dtype)
    norms: list[tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = [
        (ops.add_rms_norm, ops.rms_norm, (weight, 1e-5)),
        (ops.add_layer_norm, ops.layer_norm, (weight, bias, 1e-5)),
        (ops.add_layer_norm, ops.layer_norm, (weight, None, 1e-5)),
    ]
    for add, norm, arguments in norms:
        x, residual = torch.randn(2, 5, 100).to(dtype)
        total = x + residual
        normed, summed = add(x, residual, *arguments)
        assert summed is residual
        assert torch.equal(summed, total)
        assert torch.equal(normed, norm(total, *arguments))
        normed, summed = add(x, None, *arguments)
        assert summed is x
        assert torch.equal(normed, norm(x, *arguments))


def test_layer_norm_is_torchs() -> None:
    x, weight, bias = torch.randn(4, 33), torch.randn(33), torch.randn(33)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    close(ops.layer_norm(x, weight, bias, 1e-5), (scaled * weight + bias).float())
    close(ops.layer_norm(x, weight, None, 1e-5), (scaled * weight).float())


@pytest.mark.parametrize("name", ops.ACTIVATIONS)
def test_activations_are_those_of_transformers(name: str) -> None:
    x = torch.cat((torch.linspace(-12, 12, 401), torch.tensor([0.0, -60.0, 60.0])))
    before = x.clone()
    wanted = ACT2FN[name](x)
    close(ops.activate(x, name), wanted)
    assert torch.equal(x, before)
    gate_up = torch.cat((x, torch.randn(len(x))))[None].repeat(3, 1)
    before = gate_up.clone()
    close(ops.gated(gate_up, name), wanted * gate_up[:, len(x) :])
    assert torch.equal(gate_up, before)


def test_every_activation_of_a_config_is_implemented() -> None:
    assert set(ACTIVATIONS) <= set(ops.ACTIVATIONS)


@pytest.mark.parametrize("rotated", [DIMS, 12])
def test_rotation_is_that_of_transformers(rotated: int) -> None:
    qkv = torch.randn(5, HEADS, DIMS)
    cosines, sines, cos, sin = angles(5, rotated, torch.float32)
    turned = qkv[:, :4].transpose(0, 1)[None]
    wanted, _ = apply_rotary_pos_emb(turned[..., :rotated], turned[..., :rotated], cos, sin)
    ours = qkv.clone()
    ops.rotate_(ours[:, :4], cosines, sines)
    close(ours[:, :4, :rotated], wanted[0].transpose(0, 1))
    assert torch.equal(ours[:, :4, rotated:], qkv[:, :4, rotated:])
    assert torch.equal(ours[:, 4:], qkv[:, 4:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotated", [DIMS, 12])
def test_norm_and_rotation_at_once_are_one_after_the_other(
    rotated: int, dtype: torch.dtype
) -> None:
    qkv, weight = torch.randn(5, HEADS, DIMS).to(dtype), torch.randn(4, DIMS).to(dtype)
    cosines, sines, *_ = angles(5, rotated, dtype)
    wanted = qkv.clone()
    for head in range(4):
        wanted[:, head] = ops.rms_norm(qkv[:, head], weight[head], 1e-6)
    ops.rotate_(wanted[:, :4], cosines, sines)
    ours = qkv.clone()
    ops.norm_rotate_(ours[:, :4], weight, 1e-6, cosines, sines)
    assert torch.equal(ours, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 2050])
def test_a_row_does_not_depend_on_those_beside_it(width: int, dtype: torch.dtype) -> None:
    rows, weight = torch.randn(70, width).to(dtype), torch.randn(width).to(dtype)
    qkv, weights = torch.randn(70, HEADS, DIMS).to(dtype), torch.randn(HEADS, DIMS).to(dtype)
    cosines, sines, *_ = angles(70, DIMS, dtype)

    def rotated(first: int, end: int) -> Tensor:
        heads = qkv[first:end].clone()
        ops.norm_rotate_(heads, weights, 1e-6, cosines[first:end], sines[first:end])
        return heads

    forms: list[Callable[[int, int], Tensor]] = [
        lambda first, end: ops.rms_norm(rows[first:end], weight, 1e-5),
        lambda first, end: ops.gated(rows[first:end], "silu"),
        rotated,
    ]
    for form in forms:
        whole = form(0, 70)
        for first, end in ((0, 1), (69, 70), (3, 5), (8, 41)):
            assert torch.equal(form(first, end), whole[first:end])


class OnCuda(Tensor):
    """Says that it is on CUDA."""

    is_cuda = True


def on_cuda(*shape: int) -> Tensor:
    return torch.randn(*shape).as_subclass(OnCuda)


@pytest.fixture
def _asked_anew() -> Iterator[None]:
    ops.triton_kernels.cache_clear()
    yield
    ops.triton_kernels.cache_clear()


def put_in_place(monkeypatch: pytest.MonkeyPatch, kernels: Any) -> None:
    """``kernels`` as the module of Triton's; None: it cannot be imported."""
    monkeypatch.setitem(sys.modules, "tgi_cli.layers.triton_ops", kernels)
    if kernels is None:
        monkeypatch.delattr(layers, "triton_ops", raising=False)
    else:
        monkeypatch.setattr(layers, "triton_ops", kernels, raising=False)


def call_all() -> list[Tensor]:
    x, residual, heads, gate_up = on_cuda(3, 8), on_cuda(3, 8), on_cuda(3, 2, 8), on_cuda(3, 8)
    weight, (cosines, sines, *_) = torch.ones(8), angles(3, 8, torch.float32)
    results = [
        ops.rms_norm(x, weight, 1e-5),
        *ops.add_rms_norm(x, residual, weight, 1e-5),
        *ops.add_layer_norm(x, residual, weight, None, 1e-5),
        ops.gated(gate_up, "silu"),
    ]
    ops.rotate_(heads, cosines, sines)
    ops.norm_rotate_(heads, torch.ones(2, 8), 1e-5, cosines, sines)
    return [*results, heads]


@pytest.mark.usefixtures("_asked_anew")
def test_cuda_uses_triton_kernels_which_are_looked_up_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []

    def kernel(name: str) -> Callable[..., Tensor]:
        def call(x: Tensor, *arguments: Any) -> Tensor:
            called.append(name)
            return x

        return call

    names = ["rms_norm", "add_rms_norm", "add_layer_norm", "gated", "rotate_", "norm_rotate_"]
    kernels = SimpleNamespace(
        probe=lambda: called.append("probe"), **{name: kernel(name) for name in names}
    )
    put_in_place(monkeypatch, kernels)
    call_all()
    call_all()
    assert called == ["probe", *names, *names]
    called.clear()
    ops.rms_norm(torch.ones(1, 8), torch.ones(8), 1e-5)
    assert not called  # the CPU has the reference


def no_compiler() -> None:
    raise RuntimeError("Failed to find C compiler")


@pytest.mark.usefixtures("_asked_anew")
@pytest.mark.parametrize("kernels", [None, SimpleNamespace(probe=no_compiler)])
def test_cuda_without_a_working_triton_gets_the_reference(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put_in_place(monkeypatch, kernels)
    with caplog.at_level(logging.DEBUG):
        torch.manual_seed(1)
        results = call_all()
        call_all()
    monkeypatch.setattr(OnCuda, "is_cuda", False)
    torch.manual_seed(1)
    for ours, wanted in zip(results, call_all(), strict=True):
        assert torch.equal(ours, wanted)
    # A Triton that is not installed needs no word; one that does not work gets one.
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (0 if kernels is None else 1)
    assert all("Failed to find C compiler" in message for message in messages)
