"""Prompts in chunks. fla-core's kernels need a GPU: here transformers' take their place.

They stand in for the package as it is called: by its arguments' names, shapes and dtypes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from tests.tools.state_steps import Piece, make_states, state_metadata
from tgi_cli.attention import StateCache, StateMetadata, StateTensor
from tgi_cli.attention.state_chunks import MIN_TOKENS
from tgi_cli.errors import ConfigError
from tgi_cli.kernels import without_cpp_kernels
from tgi_cli.layers import chunked, recurrent
from tgi_cli.layers.gates import DeltaGates, GivenGates, StepSizes
from tgi_cli.process.installation import install_command

HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 16, 8


class Package:
    """What is called of fla-core."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def check(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        initial_state: Tensor,
        cu_seqlens: Tensor,
        cu_seqlens_cpu: Tensor,
    ) -> None:
        assert q.shape == k.shape
        assert q.shape[:2] == v.shape[:2]
        assert len(q) == 1
        assert q.dtype == k.dtype == v.dtype
        assert initial_state.dtype == torch.float32
        assert initial_state.shape == (
            len(cu_seqlens) - 1,
            v.shape[2],
            k.shape[3],
            v.shape[3],
        )
        assert cu_seqlens.dtype == torch.int64
        assert torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu)
        assert cu_seqlens[-1] == q.shape[1]

    def delta(self, name: str, rule: Any) -> Any:
        def call(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            g: Tensor,
            beta: Tensor,
            scale: float,
            initial_state: Tensor,
            output_final_state: bool,
            use_qk_l2norm_in_kernel: bool,
            cu_seqlens: Tensor,
            cu_seqlens_cpu: Tensor,
        ) -> tuple[Tensor, Tensor]:
            self.calls.append(name)
            self.check(q, k, v, initial_state, cu_seqlens, cu_seqlens_cpu)
            assert g.dtype == beta.dtype == torch.float32
            assert g.shape == (*v.shape[:3], *k.shape[3:]) if name == "kda" else v.shape[:3]
            assert beta.shape == v.shape[:3]
            assert scale == k.shape[3] ** -0.5
            assert output_final_state
            assert use_qk_l2norm_in_kernel
            shared = v.shape[2] // k.shape[2]
            parts, states = [], []
            for index in range(len(cu_seqlens) - 1):
                some = slice(int(cu_seqlens[index]), int(cu_seqlens[index + 1]))
                output, last = rule(
                    q[:, some].repeat_interleave(shared, 2),
                    k[:, some].repeat_interleave(shared, 2),
                    v[:, some],
                    g=g[:, some],
                    beta=beta[:, some],
                    initial_state=initial_state[index : index + 1],
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                )
                parts.append(output)
                states.append(last)
            return torch.cat(parts, 1), torch.cat(states)

        return call

    def simple(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        scale: float,
        initial_state: Tensor,
        output_final_state: bool,
        cu_seqlens: Tensor,
        cu_seqlens_cpu: Tensor,
    ) -> tuple[Tensor, Tensor]:
        self.calls.append("simple_gla")
        self.check(q, k, v, initial_state, cu_seqlens, cu_seqlens_cpu)
        assert q.shape[2] == v.shape[2]
        assert g.shape == v.shape[:3]
        assert g.dtype == torch.float32
        assert output_final_state
        output, states = torch.empty_like(v), initial_state.clone()
        for index, state in enumerate(states):
            for t in range(int(cu_seqlens[index]), int(cu_seqlens[index + 1])):
                state.mul_(g[0, t].exp()[:, None, None])
                state.add_(k[0, t, :, :, None] * v[0, t, :, None])
                output[0, t] = (state * q[0, t, :, :, None]).sum(1) * scale
        return output, states


class Launcher:
    """In the place of Triton's kernels: the reference, over the tokens that it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def recurrence(
        self,
        layer: Any,
        qkv: tuple[Tensor, Tensor, Tensor],
        decay: Tensor,
        beta: Tensor | None,
        own: Tensor,
        step: StateMetadata,
    ) -> Tensor:
        self.tokens.append(len(decay))
        cache = StateCache([], own.device)
        cache.tensors = [{"recurrent": own}]
        cache.plan(step)
        if beta is None:
            sizes = StepSizes(layer.rate, layer.bias, layer.skip, layer.floor, layer.ceiling)
            output, inputs = recurrent.state_space, (qkv[2], qkv[1], qkv[0], decay, sizes)
            return self.plainly(output, *inputs, cache, 0)
        gates: DeltaGates | GivenGates = GivenGates(layer.heads, layer.channels)
        if layer.rate is not None:
            gates = DeltaGates(layer.rate, layer.bias, layer.channels, factor=layer.beta_factor)
        return self.plainly(recurrent.gated_delta, qkv, decay, beta, gates, cache, 0)

    def plainly(self, function: Any, *args: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recurrent, "triton_for", lambda x: None)
            output: Tensor = function(*args)
            return output


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    made = Package()
    functions = {
        "fla.ops.gated_delta_rule": (
            "chunk_gated_delta_rule",
            made.delta("gated_delta_rule", torch_chunk_gated_delta_rule),
        ),
        "fla.ops.kda": ("chunk_kda", made.delta("kda", chunk_kimi_delta_attention)),
        "fla.ops.simple_gla": ("chunk_simple_gla", made.simple),
    }
    for path, (name, function) in functions.items():
        module = ModuleType(path)
        setattr(module, name, function)
        monkeypatch.setitem(sys.modules, path, module)
    chunked.functions.cache_clear()
    yield made
    chunked.functions.cache_clear()


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    made = Launcher()
    monkeypatch.setattr(recurrent, "triton_for", lambda x: made)
    with without_cpp_kernels():
        yield made


PIECES = (
    Piece(1, 3, 3),
    Piece(5, -1, 4),
    Piece(MIN_TOKENS + 20, -1, 5, MIN_TOKENS, 9),
    Piece(MIN_TOKENS + 7, 6, 7),
    Piece(2, 2, 8),
)
TOKENS = sum(piece.length for piece in PIECES)


def both(function: Any, package: Package, launcher: Launcher, kind: str) -> None:
    """Outputs, states and snapshots are those of the recurrent form."""
    state = StateTensor("recurrent", (HEADS, KEY_DIM, VALUE_DIM), torch.float32)
    found = []
    for in_chunks in (False, True):
        torch.manual_seed(1)
        states = make_states(state)
        states.tensors[0]["recurrent"][[2, 3, 6]] = torch.randn(3, HEADS, KEY_DIM, VALUE_DIM)
        states.chunked = in_chunks
        states.plan(state_metadata(PIECES))
        launcher.tokens.clear()
        found.append((function(states), states.tensors[0]["recurrent"]))
        assert launcher.tokens == ([6] if in_chunks else [TOKENS])
    assert package.calls == [kind] * 2, "up to the snapshot, and from there on"
    (wanted, wanted_states), (got, got_states) = found
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got_states, wanted_states, atol=1e-4, rtol=1e-4, equal_nan=True)
    assert got_states[[4, 5, 7, 8, 9]].isfinite().all()
    assert got_states[[0, 1]].isnan().all()


@pytest.mark.parametrize("kind", ["gated_delta_rule", "kda"])
@pytest.mark.parametrize("given", [False, True])
def test_the_delta_rule_in_chunks_is_its_recurrent_form(
    kind: str, given: bool, package: Package, launcher: Launcher
) -> None:
    torch.manual_seed(0)
    channels = kind == "kda"
    heads = HEADS
    query, key = torch.randn(2, TOKENS, KEY_HEADS, KEY_DIM)
    value, b = torch.randn(TOKENS, heads, VALUE_DIM), torch.randn(TOKENS, heads)
    numbers = heads * (KEY_DIM if channels else 1)
    a = torch.randn(TOKENS, numbers)
    gates: DeltaGates | GivenGates = DeltaGates(
        torch.rand(heads), torch.randn(numbers), channels, factor=2.0
    )
    if given:
        gates, a, b = GivenGates(heads, channels), -a.abs(), b.sigmoid()
    both(
        lambda states: recurrent.gated_delta((query, key, value), a, b, gates, states, 0),
        package,
        launcher,
        kind,
    )


def test_mamba_2_in_chunks_is_its_recurrent_form(package: Package, launcher: Launcher) -> None:
    torch.manual_seed(0)
    x, dt = torch.randn(TOKENS, HEADS, VALUE_DIM), torch.randn(TOKENS, HEADS)
    b, c = torch.randn(2, TOKENS, KEY_HEADS, KEY_DIM)
    sizes = StepSizes(torch.rand(HEADS), torch.randn(HEADS), torch.randn(HEADS), 0.1, 2.0)
    both(
        lambda states: recurrent.state_space(x, b, c, dt, sizes, states, 0),
        package,
        launcher,
        "simple_gla",
    )


def test_a_norm_that_the_kernels_have_not_is_computed_token_by_token(
    package: Package, launcher: Launcher
) -> None:
    state = StateTensor("recurrent", (HEADS, KEY_DIM, VALUE_DIM), torch.float32)
    states = make_states(state)
    states.chunked = True
    states.plan(state_metadata([Piece(MIN_TOKENS, -1, 0)]))
    key, value = (torch.randn(MIN_TOKENS, HEADS, size) for size in (KEY_DIM, VALUE_DIM))
    zeros, gates = torch.zeros(MIN_TOKENS, HEADS), GivenGates(HEADS)
    recurrent.gated_delta((key, key, value), zeros, zeros, gates, states, 0, eps=1e-5)
    assert launcher.tokens == [MIN_TOKENS]
    assert package.calls == []


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    chunked.functions.cache_clear()
    with pytest.raises(ConfigError, match="--state-prefill chunked needs the package") as caught:
        chunked.functions()
    assert install_command("fla") in caught.value.remedy


def test_another_version_of_the_package_is_refused(
    monkeypatch: pytest.MonkeyPatch, package: Package
) -> None:
    monkeypatch.setitem(sys.modules, "fla.ops.kda", ModuleType("fla.ops.kda"))
    with pytest.raises(ConfigError, match="chunk_kda"):
        chunked.functions()
