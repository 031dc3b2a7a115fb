"""Compare implementations of mixture-of-experts layers: milliseconds per layer.

    python -m tests.benchmarks.moe [--device cpu] [--dtype bfloat16] [--threads 1]

``one by one`` is used on CPUs, with each expert's weights packed for oneDNN. ``grouped_mm`` is
torch's kernel, ``triton`` is ours, and ``chosen`` is the one that is used on this GPU. CPU times
are thread times, so that other processes have little influence.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from unittest.mock import patch

import torch
from torch import Tensor

from tgi_cli.layers import Build, grouped
from tgi_cli.layers.base import Loadable
from tgi_cli.layers.moe import MoE
from tgi_cli.models.spec import MoESpec
from tgi_cli.quantization import Unquantized
from tgi_cli.quantization.tiled_weight import ExpertRows

SHAPES = {
    "qwen3-30b-a3b": (2048, MoESpec(num_experts=128, top_k=8, intermediate_size=768)),
    "small mixtral": (1024, MoESpec(num_experts=8, top_k=2, intermediate_size=3584)),
    "gpt-oss-20b": (
        2880,
        MoESpec(
            num_experts=32,
            top_k=4,
            intermediate_size=2880,
            activation="clamped_swiglu",
            router="topk_softmax",
            router_bias=True,
            expert_bias=True,
        ),
    ),
    "tiny": (64, MoESpec(num_experts=4, top_k=2, intermediate_size=32)),
}
"""By name; the last one is to try the script with."""
TOKENS = (1, 8, 32, 512)
EXPERTS = "tgi_cli.layers.experts"


def build(hidden: int, spec: MoESpec, dtype: torch.dtype, device: torch.device, stack: bool) -> MoE:
    """Build a layer with random weights, stacked for grouped products if ``stack``."""
    moe = MoE(Build(dtype, Unquantized()), hidden, **asdict(spec))
    if stack:
        moe.experts.stack(device)
    generator = torch.Generator(device).manual_seed(0)
    for path, layer in moe.named_modules():
        if isinstance(layer, Loadable):
            layer.materialize(device)
            for slot in layer.slots(path):
                std = slot.shape[-1] ** -0.5
                weight = torch.empty(slot.shape, device=device)
                slot.fill(weight.normal_(0, std, generator=generator))
            layer.finish()
    return moe


def torch_grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, groups: grouped.Groups
) -> Tensor:
    product = torch._grouped_mm(x, weight.transpose(1, 2), offs=groups.ends)
    return product if bias is None else product.add_(bias.index_select(0, groups.experts))


def triton_grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, groups: grouped.Groups
) -> Tensor:
    from tgi_cli.layers.triton_grouped import triton_grouped_linear

    return triton_grouped_linear(x, weight, bias, ExpertRows(groups.ends, groups.pairs))


def measure(run: Callable[[Tensor], Tensor], inputs: list[Tensor]) -> float:
    """Return the median milliseconds over the inputs, which select different experts."""
    run(inputs[0])
    times = []
    for x in inputs:
        if x.is_cuda:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run(x)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
        else:
            begin = time.thread_time()
            run(x)
            times.append((time.thread_time() - begin) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shape", choices=sorted(SHAPES), action="append")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype, device = getattr(torch, arguments.dtype), arguments.device
    ways: dict[str, Callable[..., Tensor] | None] = {}
    if device.type == "cpu":
        ways = {"one by one": None, "grouped_mm": torch_grouped_linear}
    else:
        ways = {
            "chosen": None,
            "grouped_mm": torch_grouped_linear,
            "triton": triton_grouped_linear,
        }
    print(f"{'':28}" + "".join(f"{tokens:>9}" for tokens in TOKENS))
    for name in arguments.shape or list(SHAPES)[:-1]:
        hidden, spec = SHAPES[name]
        for way, function in ways.items():
            with torch.inference_mode():
                stacked = function is not None or device.type != "cpu"
                moe = build(hidden, spec, dtype, device, stacked)
                row = []
                for tokens in TOKENS:
                    count = 3 if device.type == "cpu" and tokens > 32 else 10
                    inputs = [torch.randn(tokens, hidden).to(device, dtype) for _ in range(count)]
                    with ExitStack() as stack:
                        if function is not None:
                            stack.enter_context(patch(f"{EXPERTS}.grouped_linear", function))
                            stack.enter_context(patch(f"{EXPERTS}.can_fuse", lambda *_: False))
                        row.append(measure(moe, inputs))
            print(f"{name:16}{way:12}" + "".join(f"{each:9.2f}" for each in row), flush=True)


if __name__ == "__main__":
    main()
