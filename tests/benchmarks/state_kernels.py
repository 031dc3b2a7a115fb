"""Measure the CPU's kernels of layers with states, and of latent attention, on one core.

    python -m tests.benchmarks.state_kernels [--tokens 256] [--rows 16] [--rounds 15]

Each kernel runs a prompt of ``--tokens`` tokens, and a decode step of ``--rows`` sequences whose
states are in no cache, beside the function of transformers that computes the same in bfloat16 (of
convolutions, gates, heads and latent attention the same operations in torch). Times are medians of
the thread's own CPU time, in microseconds per token: they leave out the time that other processes
have the core. The share is the time that reading and writing the states and the tokens' numbers
takes at the rate of a large copy, over the time taken. Sizes are those of Qwen3.5-4B, Kimi-Linear,
Granite 4 H Tiny, Falcon-Mamba, LFM2-1.2B and DeepSeek-V2-Lite, per layer. Mamba is in float32.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan
from transformers.models.kimi_linear.modeling_kimi_linear import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from tests.tools.paged_run import CPU, make_metadata
from tgi_cli.attention import KVSpec
from tgi_cli.attention.cpu_cpp import CppAttention
from tgi_cli.kernels import library
from tgi_cli.kernels.heads import HeadMatrices, heads_linear
from tgi_cli.kernels.recurrence import (
    ConvolutionLayer,
    GateLayer,
    RecurrenceLayer,
    StepSlots,
    convolution,
    gate,
    recurrence,
)
from tgi_cli.kernels.scan import selective_scan

BF16 = torch.bfloat16
COLD = 192 << 20
"""Bytes of states, beyond the caches."""

Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One kernel over some tokens.

    Attributes:
        name: of the kernel.
        phase: ``prefill`` or ``decode``.
        tokens: of a run.
        nbytes: that a run has to read and write.
        ours, theirs: the kernel, and transformers' function.
    """

    name: str
    phase: str
    tokens: int
    nbytes: int
    ours: Run
    theirs: Run


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape).to(BF16)


def slots_of(lens: list[int], first: int = 0) -> StepSlots:
    """Sequences of these lengths in slots ``first`` and following."""
    where = torch.arange(first, first + len(lens))
    starts, none = torch.tensor([0, *lens]).cumsum(0), torch.full_like(where, -1)
    return StepSlots.of(sum(lens), starts, [where, where, torch.zeros_like(where), none])


def rotating(lens: list[int], state_bytes: int) -> tuple[int, Callable[[], StepSlots]]:
    """How many slots there are, and the next ones of them; a decode finds them in no cache."""
    sets = 1 if lens[0] > 1 else max(1, COLD // (state_bytes * len(lens)))
    made = itertools.cycle([slots_of(lens, i * len(lens)) for i in range(sets)])
    return sets * len(lens), lambda: next(made)


def deltas(phase: str, lens: list[int], channels: bool) -> Case:
    heads, key_heads, dim = 32, 32 if channels else 16, 128
    rows, tokens, state = heads * (dim if channels else 1), sum(lens), heads * dim * dim * 4
    query, key, value = (bf16(tokens, n, dim) for n in (key_heads, key_heads, heads))
    a, b, rate, bias = bf16(tokens, rows), bf16(tokens, heads), torch.rand(heads), torch.randn(rows)
    layer = RecurrenceLayer(
        heads=heads, key_heads=key_heads, key_dim=dim, value_dim=dim, rate=rate + 0.5,
        bias=bias, channels=channels, norm_eps=1e-6, scale=dim**-0.5,
    )  # fmt: skip
    count, slots = rotating(lens, state)
    states = torch.zeros(count, heads, dim, dim)

    def theirs() -> object:
        shape = (len(lens), tokens // len(lens))
        decays = F.softplus(a.float() + bias).view(*shape, heads, -1) * -rate[:, None]
        if channels:
            function = recurrent_kimi_delta_attention
            if lens[0] > 1:
                function = chunk_kimi_delta_attention
        else:
            decays, function = decays[..., 0], torch_recurrent_gated_delta_rule
            if lens[0] > 1:
                function = torch_chunk_gated_delta_rule
        return function(
            *(x.view(*shape, -1, dim) for x in (query, key, value)),
            g=decays,
            beta=b.sigmoid().view(*shape, heads),
            initial_state=states[: len(lens)],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )

    def ours() -> object:
        return recurrence(layer, (query, key, value), a, b, states, slots())

    moved = 2 * state * len(lens) + sum(x.nbytes for x in (query, key, value, value, a, b))
    return Case("KDA" if channels else "delta rule", phase, tokens, moved, ours, theirs)


def state_space(phase: str, lens: list[int]) -> Case:
    heads, dim, size, tokens = 48, 64, 128, sum(lens)
    x, b, c = bf16(tokens, heads, dim), bf16(tokens, 1, size), bf16(tokens, 1, size)
    dt, rate, bias, skip = bf16(tokens, heads), *(torch.rand(heads) for _ in range(3))
    state = heads * dim * size * 4
    layer = RecurrenceLayer(
        heads=heads, key_heads=1, key_dim=size, value_dim=dim, delta=False, rate=rate + 0.5,
        bias=bias, skip=skip,
    )  # fmt: skip
    count, slots = rotating(lens, state)
    states = torch.zeros(count, heads, size, dim)

    def theirs() -> object:
        shape = (len(lens), tokens // len(lens))
        if lens[0] > 1:
            return mamba2_chunk_scan(
                *(part.view(*shape, *part.shape[1:]) for part in (x, dt)), -rate,
                *(part.view(*shape, *part.shape[1:]) for part in (b, c)),
                chunk_size=256, D=skip, dt_bias=bias, dt_softplus=True,
            )  # fmt: skip
        # What its module does to one token, on the states of all sequences.
        old = states[: len(lens)].view(len(lens), heads, dim, size)
        step = F.softplus(dt.float() + bias)
        added = (step[..., None] * x.float())[..., None] * b.float()[:, :, None]
        new = old * torch.exp(-rate * step)[..., None, None] + added
        return (new * c.float()[:, :, None]).sum(-1) + skip[:, None] * x

    def ours() -> object:
        return recurrence(layer, (c, b, x), dt, None, states, slots())

    moved = 2 * state * len(lens) + sum(part.nbytes for part in (x, x, b, c, dt))
    return Case("Mamba-2", phase, tokens, moved, ours, theirs)


def scans(phase: str, lens: list[int]) -> Case:
    channels, size, tokens = 8192, 16, sum(lens)
    x, steps = torch.randn(tokens, channels), torch.rand(tokens, channels)
    a = -torch.rand(channels, size)
    b, c = torch.randn(2, tokens, size)
    state = channels * size * 4
    count, slots = rotating(lens, state)
    states = torch.zeros(count, channels, size)

    def theirs() -> object:
        if lens[0] > 1:
            return mamba_selective_scan(x.T[None], steps.T[None], a, b.T[None], c.T[None])
        # What its module does to one token, on the states of all sequences.
        added = (steps * x)[..., None] * b[:, None]
        new = states[: len(lens)] * torch.exp(steps[..., None] * a) + added
        return (new * c[:, None]).sum(-1)

    def ours() -> object:
        return selective_scan(x, steps, a, b, c, states, slots())

    moved = 2 * state * len(lens) + sum(part.nbytes for part in (x, x, steps, b, c))
    return Case("Mamba", phase, tokens, moved, ours, theirs)


def convolutions(phase: str, lens: list[int], short: bool) -> Case:
    channels, taps, tokens = (2048, 3, sum(lens)) if short else (8192, 4, sum(lens))
    x, before, after = (bf16(tokens, channels) for _ in range(3))
    layer = ConvolutionLayer(torch.randn(taps, channels), None, None if short else "silu")
    weight = layer.weight.T.to(BF16)
    count, slots = rotating(lens, (taps - 1) * channels * 2)
    states = torch.zeros(count, taps - 1, channels, dtype=BF16)

    def theirs() -> object:
        inputs = before * x if short else x
        inputs = inputs.view(len(lens), -1, channels).transpose(1, 2)
        inputs = torch.cat((states[: len(lens)].transpose(1, 2), inputs), -1)
        states[: len(lens)] = inputs[:, :, 1 - taps :].transpose(1, 2)
        y = F.conv1d(inputs, weight[:, None], groups=channels).transpose(1, 2)
        return y.reshape(tokens, channels) * after if short else F.silu(y)

    def ours() -> object:
        if short:
            return convolution(layer, x, states, slots(), before, after)
        return convolution(layer, x, states, slots())

    moved = (4 if short else 2) * x.nbytes + 2 * states[: len(lens)].nbytes
    return Case("short convolution" if short else "convolution", phase, tokens, moved, ours, theirs)


def gates(phase: str, lens: list[int]) -> Case:
    tokens, weight = sum(lens), torch.rand(128)
    x, by = bf16(tokens, 32, 128), bf16(tokens, 32, 128)
    layer, rounded = GateLayer("silu", weight, 1e-6), weight.to(BF16)

    def theirs() -> object:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return ((rounded * wide.to(BF16)) * F.silu(by.float())).to(BF16)

    return Case("gated norm", phase, tokens, 3 * x.nbytes, lambda: gate(layer, x, by), theirs)


def heads_products(phase: str, lens: list[int]) -> Case:
    weights, x = bf16(16, 512, 128), bf16(sum(lens), 16, 128)
    matrices, turned = HeadMatrices.pack(weights), weights.transpose(1, 2).contiguous()

    def theirs() -> object:
        return torch.bmm(x.transpose(0, 1), turned).transpose(0, 1)

    moved = weights.nbytes + 5 * x.nbytes
    return Case("heads", phase, sum(lens), moved, lambda: heads_linear(x, matrices), theirs)


def latents(phase: str, lens: list[int], context: int) -> Case:
    heads, dim, rank, tokens = 16, 576, 512, sum(lens)
    attention = CppAttention([KVSpec(1, dim, value_dim=rank, values_in_keys=True)], 16, BF16, CPU)
    blocks = -(-context // 16)
    attention.allocate(blocks * len(lens))
    for cache in attention.key_cache:
        cache.normal_()
    tables = [[*range(i * blocks, (i + 1) * blocks)] for i in range(len(lens))]
    attention.plan(make_metadata(tables, lens, [context] * len(lens), 16))
    query, rows = bf16(tokens, heads, dim), bf16(tokens, 1, dim)
    keys = bf16(len(lens), context, dim)

    def theirs() -> object:
        # Its modules expand the latents: the absorbed form in torch, which takes less.
        scores = query.view(len(lens), -1, dim) @ keys.transpose(1, 2) * 0.1
        if lens[0] > 1:
            hidden = torch.ones(lens[0], context, dtype=torch.bool).triu(context - lens[0] + 1)
            scores.masked_fill_(hidden.repeat_interleave(heads, 0), -torch.inf)
        return scores.float().softmax(-1).to(BF16) @ keys[..., :rank]

    moved = len(lens) * context * dim * 2 + query.nbytes * 2
    return Case(
        f"latent attention, {context} keys", phase, tokens, moved,
        lambda: attention(0, query, rows, None, 0.1), theirs,
    )  # fmt: skip


def cases(tokens: int, rows: int) -> Iterator[Case]:
    for phase, lens in (("prefill", [tokens]), ("decode", [1] * rows)):
        yield deltas(phase, lens, channels=False)
        yield deltas(phase, lens, channels=True)
        yield state_space(phase, lens)
        yield scans(phase, lens)
        yield convolutions(phase, lens, short=False)
        yield convolutions(phase, lens, short=True)
        yield gates(phase, lens)
        yield heads_products(phase, lens)
        yield latents(phase, lens, max(1024, tokens))


def seconds(run: Run, rounds: int) -> float:
    """The median of so many runs on one thread, after one that is not counted."""
    taken = []
    for _ in range(rounds + 1):
        began = time.thread_time()
        run()
        taken.append(time.thread_time() - began)
    return statistics.median(taken[1:])


def copy_rate(rounds: int) -> float:
    """Bytes that a large copy reads and writes per second."""
    source = torch.ones(COLD, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * COLD / seconds(lambda: target.copy_(source), rounds)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    library.set_threads(1)
    torch.manual_seed(0)
    rate = copy_rate(arguments.rounds)
    print(f"a copy moves {rate / 1e9:.1f} GB/s, kernels for {library.describe_kernels()}\n")
    print("| kernel | phase | us per token | share of the copy's rate | transformers | ratio |")
    print("|---|---|---|---|---|---|")
    for case in cases(arguments.tokens, arguments.rows):
        ours = seconds(case.ours, arguments.rounds)
        theirs = seconds(case.theirs, arguments.rounds)
        print(
            f"| {case.name} | {case.phase} | {1e6 * ours / case.tokens:.1f}"
            f" | {case.nbytes / rate / ours:.0%} | {1e6 * theirs / case.tokens:.1f}"
            f" | {theirs / ours:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
