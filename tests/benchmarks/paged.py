"""Compare paged attention on a CPU: C++ kernels, torch's operations and torch's SDPA.

    python -m tests.benchmarks.paged [--heads 9] [--kv-heads 3] [--head-dim 64] [--cache fp8_e4m3]

Times are per layer and call in bfloat16 on one thread, including writing keys and values: the
minimum CPU time over several rounds, in which backends take turns. Decodes run over enough layers
to fill a KV cache of 256 MB, so that keys and values are read from memory, as in a model; ``share``
is relative to the bandwidth at which the same core reads a large tensor. Prefills stay in the CPU
caches; GFLOP/s count the operations that a causal mask leaves, and ``share`` is relative to a
large matrix product. ``SDPA`` is torch's attention over contiguous keys and values.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tgi_cli.attention import AttentionMetadata, KVSpec, PagedAttention, create_attention
from tgi_cli.kernels import cpp_library

BLOCK = 16
CACHE_BYTES = 256 << 20
CPU = torch.device("cpu")
CACHES = {
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a layer and the dtype of its KV cache."""

    heads: int
    kv_heads: int
    head_dim: int
    cache_dtype: torch.dtype

    def kv_bytes(self, tokens: int) -> int:
        """KV cache bytes of ``tokens`` in one layer."""
        return 2 * tokens * self.kv_heads * self.head_dim * self.cache_dtype.itemsize

    def tensors(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return random queries, keys and values."""
        generator = torch.Generator().manual_seed(tokens)
        query, key, value = (
            torch.randn(tokens, heads, self.head_dim, generator=generator).bfloat16()
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        return query, key, value


def thread_seconds(step: Callable[[], object], repeats: int = 1) -> float:
    """Return the CPU time of this thread per call."""
    began = time.thread_time_ns()
    for _ in range(repeats):
        step()
    return (time.thread_time_ns() - began) / 1e9 / repeats


def minimum(steps: Sequence[Callable[[], object]], rounds: int, seconds: float) -> list[float]:
    """Return the minimum time of each step, taking turns for about ``seconds``."""
    fastest = [thread_seconds(step) for step in steps]
    repeats = [max(1, int(seconds / rounds / len(steps) / spent)) for spent in fastest]
    for _ in range(rounds):
        for index, step in enumerate(steps):
            fastest[index] = min(fastest[index], thread_seconds(step, repeats[index]))
    return fastest


def read_bandwidth() -> float:
    """Return the bytes per second that one thread reads."""
    large = torch.ones(CACHE_BYTES // 4)
    return float(large.nbytes / minimum([large.sum], 5, 0.5)[0])


def matrix_rate() -> float:
    """Return the operations per second of one thread in a large matrix product."""
    left, right = torch.randn(2, 1024, 2048).bfloat16()
    return 2 * 1024 * 2048 * 1024 / minimum([lambda: left @ right.t()], 5, 0.5)[0]


def prepared(
    kind: str, shape: Shape, layers: int, batch: int, queries: int, context: int
) -> PagedAttention:
    """Return a backend with a planned step: sequences of ``context`` tokens in random blocks."""
    spec = KVSpec(shape.kv_heads, shape.head_dim)
    attention = create_attention(
        kind, [spec] * layers, BLOCK, torch.bfloat16, CPU, shape.cache_dtype
    )
    columns = -(-context // BLOCK)
    attention.allocate(batch * columns)
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(batch * columns, generator=generator).view(batch, columns)
    slots = (table[:, :, None] * BLOCK + torch.arange(BLOCK)).view(batch, -1)
    _, key, value = shape.tensors(batch * context)
    for layer in range(layers):
        attention.write(layer, key, value, slots[:, :context].flatten())
    attention.plan(
        AttentionMetadata(
            query_start_loc=torch.arange(0, batch * queries + 1, queries).int(),
            kv_lens=torch.full((batch,), context).int(),
            block_table=table.int(),
            slot_mapping=slots[:, context - queries : context].flatten(),
            query_lens_host=[queries] * batch,
            kv_lens_host=[context] * batch,
            num_decodes=batch if queries == 1 else 0,
        )
    )
    return attention


def decode(shape: Shape, batch: int, context: int, bandwidth: float) -> str:
    """Measure a decode and return its table row."""
    layers = max(2, CACHE_BYTES // shape.kv_bytes(batch * context))
    query, key, value = shape.tensors(batch)

    def steps(kind: str) -> Callable[[], None]:
        attention = prepared(kind, shape, layers, batch, 1, context)

        def step() -> None:
            for layer in range(layers):
                attention(layer, query, key, value, shape.head_dim**-0.5)

        return step

    ours, theirs = (spent / layers for spent in minimum([steps("native"), steps("cpu")], 5, 3.0))
    rate = shape.kv_bytes(batch * context) / ours
    return (
        f"{batch:6} {context:8} {ours * 1e6:12.1f} {theirs * 1e6:12.1f} {theirs / ours:8.1f}"
        f" {rate / 1e9:8.1f} {rate / bandwidth:8.0%}"
    )


def prefill(shape: Shape, tokens: int, context: int, peak: float) -> str:
    """Measure a prefill of the last ``tokens`` of ``context`` and return its table row."""
    query, key, value = shape.tensors(tokens)
    scale = shape.head_dim**-0.5
    attentions = [prepared(kind, shape, 1, 1, tokens, context) for kind in ("native", "cpu")]
    whole = [some.transpose(0, 1)[None].contiguous() for some in shape.tensors(context)]
    share = shape.heads // shape.kv_heads
    keys, values = (some.repeat_interleave(share, 1) for some in whole[1:])
    queries = whole[0][:, :, -tokens:].contiguous()
    seen = torch.ones(tokens, context, dtype=torch.bool).tril(context - tokens)

    def contiguous() -> Tensor:
        if tokens == context:
            return scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return scaled_dot_product_attention(queries, keys, values, attn_mask=seen)

    paged = [lambda a=a: a(0, query, key, value, scale) for a in attentions]
    ours, theirs, stock = minimum([*paged, contiguous], 3, 2.0)
    visible = tokens * (context - (tokens - 1) / 2)
    rate = 4 * visible * shape.heads * shape.head_dim / ours
    return (
        f"{tokens:6} {context:8} {ours * 1e3:12.2f} {theirs * 1e3:12.2f} {stock * 1e3:8.2f}"
        f" {theirs / ours:8.1f} {rate / 1e9:8.0f} {rate / peak:8.0%}"
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--cache", choices=CACHES, default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument(
        "--contexts", type=int, nargs="*", default=[128, 256, 512, 1024, 2048, 4096, 8192]
    )
    parser.add_argument(
        "--max-tokens", type=int, default=65536, help="limit of batch size times context"
    )
    arguments = parser.parse_args()
    if cpp_library() is None:
        raise SystemExit("the kernels were not compiled: python -m tgi_cli.kernels")
    torch.set_num_threads(1)
    shape = Shape(arguments.heads, arguments.kv_heads, arguments.head_dim, CACHES[arguments.cache])
    bandwidth, peak = read_bandwidth(), matrix_rate()
    print(f"{shape.heads} / {shape.kv_heads} heads of {shape.head_dim}, {arguments.cache}")
    print(f"one core reads {bandwidth / 1e9:.1f} GB/s and multiplies {peak / 1e9:.0f} GFLOP/s\n")
    print("decode  context    native us       cpu us    times     GB/s    share")
    for batch in arguments.batches:
        for context in arguments.contexts:
            if batch * context <= arguments.max_tokens:
                print(decode(shape, batch, context, bandwidth), flush=True)
    print("\ntokens  context    native ms       cpu ms  SDPA ms    times  GFLOP/s    share")
    for context in arguments.contexts:
        print(prefill(shape, min(context, 1024), context, peak), flush=True)


if __name__ == "__main__":
    main()
