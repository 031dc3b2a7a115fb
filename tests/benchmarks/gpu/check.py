"""The call ``check``: kernels, graphs and whole models, compared with the CPU's float32.

    python -m tests.benchmarks.gpu.check DEVICE FOLDER MINIATURE

compares one model, as the section ``parity`` does with each in a process of its own; the last line
of output is what it found, as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.benchmarks import attention, moe, ops
from tests.benchmarks.gpu.engine import Played, Workload, make, play, random_prompts
from tests.benchmarks.gpu.sections import Call, Section
from tests.parity.cases import CASES
from tests.tools import quantized
from tests.tools.checkpoints import make_llama
from tests.tools.lora_adapters import make_adapter
from tgi_cli.engine.step import NewRow, Step
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.sizing.profile_steps import add_row, with_slots

SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
LENGTHS = (1, 15, 16, 17, 40, 100, 131, 200, 7, 64, 33)
"""Prompt lengths: block boundaries, several prefill chunks, a batch that CUDA graphs pad."""
NEW_TOKENS = 24
LIMITS: dict[str, Any] = {
    "max_total_tokens": 512,
    "max_batch_prefill_tokens": 96,
    "max_batch_size": 16,
    "max_batch_total_tokens": 16 * 512,
    "load_format": "auto",
}

TOLERANCES = {"float32": 0.01, "bfloat16": 1.0}
"""Largest difference of log-probabilities from the CPU's in float32, for equal tokens and for the
first token of a text that differs, which must be nearly as likely."""

ROUNDED = 1.5
"""The same where the device rounds more than the CPU does: inputs, or the cache."""


@dataclass(frozen=True)
class Miniature:
    """A model whose output on the device is compared with the CPU's.

    Attributes:
        make: writes the checkpoint into a folder, and returns it.
        vocab_size: of its prompts.
        options: of the engine, on the device and on the CPU.
        tolerance: in place of the one of bfloat16.
        dtypes: in which it is run.
        adapter: whether its requests use one.
    """

    make: Callable[[Path], Path]
    vocab_size: int = SHAPE["vocab_size"]
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = TOLERANCES["bfloat16"]
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    adapter: bool = False


def _llama(folder: Path, **changes: Any) -> Path:
    return make_llama(folder / "llama", seed=3, **SHAPE, **changes)


def _of(case: str) -> Callable[[Path], Path]:
    """A family's miniature; needs transformers, which GPUs' hosts may lack."""

    def make_it(folder: Path) -> Path:
        from tests.parity.checkpoints import make_checkpoint

        found = CASES[case]
        values = dict(found.values) | {"max_position_embeddings": 1024}
        return make_checkpoint(replace(found, values=values), folder / "family", seed=3)

    return make_it


def _quantized(layout: quantized.Layout) -> Callable[[Path], Path]:
    return lambda folder: quantized.write_quantized(_llama(folder), folder / "quantized", layout)


MINIATURES = {
    "attention": Miniature(_llama),
    "a vocabulary of 128k": Miniature(
        lambda folder: make_llama(folder / "wide", seed=3, **(SHAPE | {"vocab_size": 128256})),
        vocab_size=128256,
        dtypes=("bfloat16",),
    ),
    "cache in e4m3": Miniature(
        _llama, options={"kv_cache_dtype": "fp8_e4m3fn"}, tolerance=ROUNDED, dtypes=("bfloat16",)
    ),
    "adapter": Miniature(_llama, options={"max_loras": 2}, adapter=True),
    "gptq, 4 bits": Miniature(_quantized(quantized.gptq(4, 32)), dtypes=("bfloat16",)),
    "awq, 4 bits": Miniature(_quantized(quantized.awq(32)), dtypes=("bfloat16",)),
    "fp8 by row": Miniature(
        _quantized(quantized.fp8("channel")), tolerance=ROUNDED, dtypes=("bfloat16",)
    ),
    "fp8 by block": Miniature(
        _quantized(quantized.fp8("block")), tolerance=ROUNDED, dtypes=("bfloat16",)
    ),
    "int8": Miniature(_quantized(quantized.int_quantized()), dtypes=("bfloat16",)),
    "nf4": Miniature(_quantized(quantized.bitsandbytes_4bit("nf4")), dtypes=("bfloat16",)),
    "nvfp4": Miniature(_quantized(quantized.nvfp4("modelopt")), dtypes=("bfloat16",)),
    "experts": Miniature(_of("Qwen 3 MoE"), 256),
    "windows and softcaps": Miniature(_of("Gemma 2"), 256),
    "sinks, and experts in 4 bits": Miniature(_of("gpt-oss"), 256),
    "chunks of positions": Miniature(_of("Llama 4"), 256),
    "recurrent states": Miniature(_of("Qwen 3.5"), 256),
    "decays per channel": Miniature(_of("Kimi Linear"), 256),
    "state space layers": Miniature(_of("Granite 4"), 256),
    "latent attention": Miniature(_of("DeepSeek V3"), 256),
}
"""By name. The first one is all that runs where the script itself is tested."""


def parity(folder: Path, kind: str, name: str) -> dict[str, Any]:
    """Generate greedy tokens on the device: with and without graphs and overlapping steps.

    Raises:
        AssertionError: they differ from the CPU's by more than the tolerance.
        ImportError: the miniature needs a package that is not there.
    """
    wrong: list[str] = []
    found = _compared(name, MINIATURES[name], folder, kind, wrong)
    assert not wrong, "; ".join(wrong)
    return found


def _compared(
    name: str, miniature: Miniature, folder: Path, kind: str, wrong: list[str]
) -> dict[str, Any]:
    """How one miniature does; adds to ``wrong``."""
    checkpoint = miniature.make(folder)
    adapter = make_adapter(checkpoint, folder / "adapter") if miniature.adapter else None
    prompts = [
        random_prompts(1, length, miniature.vocab_size, seed)[0]
        for seed, length in enumerate(LENGTHS)
    ]
    workload = Workload(prompts, NEW_TOKENS, adapter=adapter)
    options = LIMITS | miniature.options
    torch.backends.cuda.matmul.allow_tf32 = False
    reference = make(checkpoint, "cpu", dtype="float32", **options)
    expected = play(*reference, workload, depth=0)
    del reference
    found: dict[str, Any] = {f"{name}, tokens": expected.count}
    for dtype in miniature.dtypes:
        limit = TOLERANCES[dtype] if dtype == "float32" else miniature.tolerance
        for graphs in (False, True):
            worker, limits = make(checkpoint, kind, dtype=dtype, graphs=graphs, **options)
            if graphs and kind == "cuda" and worker.runner.graphs is None:
                wrong.append(f"{name}, {dtype}: graphs could not be captured")
            for depth in (0, 1):
                same, difference = _compare(expected, play(worker, limits, workload, depth))
                how = f"{name}, {dtype}, {'graphs' if graphs else 'eager'}, depth {depth}"
                found[how] = f"{same} equal tokens, logprobs within {difference:.2g}"
                if not difference <= limit:
                    wrong.append(f"{how}: {found[how]}")
            del worker
    return found


def _compare(expected: Played, got: Played) -> tuple[int, float]:
    """Count the tokens before each first difference; also return the largest logprob difference."""
    same, largest = 0, 0.0
    for request, tokens in expected.tokens.items():
        for index, token in enumerate(tokens):
            difference = got.logprobs[request][index] - expected.logprobs[request][index]
            largest = max(largest, abs(difference))
            if got.tokens[request][index] != token:
                break
            same += 1
    return same, largest


def native_tests(pattern: str) -> list[str]:
    """Test files that run on a GPU as they are: kernels against their references, and graphs."""
    return sorted(str(path) for path in Path("tests/unit").rglob(pattern))


def _kernels(call: Call) -> dict[str, Any]:
    """Run the kernels' tests, which elsewhere are interpreted, as they are compiled here."""
    return _pytest(call, native_tests("triton_*results.py"), "kernels")


def _graphs(call: Call) -> dict[str, Any]:
    return _pytest(call, native_tests("test_*_device.py"), "graphs")


def _pytest(call: Call, files: list[str], name: str) -> dict[str, Any]:
    """Run test files.

    Raises:
        AssertionError: some failed, or they took too long.
    """
    if importlib.util.find_spec("pytest") is None:
        return {"pytest": "not installed"}
    # Ignore the project's pytest options, which need plugins that may not be installed.
    command = [sys.executable, "-m", "pytest", "-v", "-c", "/dev/null", "--rootdir", ".", *files]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", "8"]
    if importlib.util.find_spec("pytest_timeout") is not None:
        command += ["--timeout", "120"]
    return {
        "files": len(files),
        "pytest": call.program(command, call.out / f"{name}.txt").splitlines()[-1],
    }


@contextmanager
def compilations() -> Iterator[list[str]]:
    """A list of the kernels that Triton compiles, or loads from its cache, meanwhile."""
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield []
        return
    found: list[str] = []
    compile_it = JITFunction._do_compile

    def compile_and_note(self: Any, *given: Any, **named: Any) -> Any:
        found.append(self.__name__)
        return compile_it(self, *given, **named)

    with patch.object(JITFunction, "_do_compile", compile_and_note):
        yield found


def _variants(call: Call) -> dict[str, Any]:
    """Random steps after warm-up compile nothing."""
    shape = {"cuda": "1b", "cpu": "tiny"}[call.kind]
    limits = {"max_batch_size": 64, "max_total_tokens": 4096, "max_batch_prefill_tokens": 2048}
    if not call.large:
        limits = {"max_batch_size": 4, "max_total_tokens": 128, "max_batch_prefill_tokens": 64}
        limits["max_batch_total_tokens"] = 1024
    worker, scheduled = call.worker(shape, **limits)
    choose, steps = random.Random(3), 200 if call.large else 10
    with compilations() as found:
        for _ in range(steps):
            step = random_step(choose, limits, scheduled.num_blocks, scheduled.block_size)
            step = with_slots(step, scheduled.num_state_slots)
            worker.sample(worker.launch(step)).wait()
    call.free()
    assert not found, f"compiled while serving: {', '.join(sorted(set(found)))}"
    return {"steps": steps, "compiled": 0}


def random_step(
    choose: random.Random, limits: dict[str, int], num_blocks: int, block_size: int
) -> Step:
    """Decodes, short chunks and prompts of random numbers and lengths, as limits allow."""
    step, left = Step(0), limits["max_batch_prefill_tokens"]
    rows = choose.choice([1, 2, choose.randint(1, limits["max_batch_size"])])
    decodes = choose.choice([0, choose.randint(0, rows), rows])
    step.num_decodes = decodes
    sampling = SamplingParams(
        temperature=choose.choice([0.0, 0.7]), seed=1, top_p=choose.choice([1.0, 0.9])
    )
    for row in range(rows):
        end = choose.randint(1, limits["max_total_tokens"] - 1)
        count = 1
        if row >= decodes:
            count = min(end, left, choose.choice([1, choose.randint(1, 80), left]))
        if not count:
            break
        left -= count * (row >= decodes)
        blocks = [choose.randrange(num_blocks) for _ in range(-(-end // block_size))]
        step.new.append(NewRow(row, row, [3] * end, end, blocks, sampling))
        add_row(step, row, end - count, count)
    return step


def _attention(call: Call) -> list[dict[str, Any]]:
    """Attention alone, in the dtype of the model and with a cache of 8 bits."""
    rows = []
    small: dict[str, Any] = {}
    if not call.large:
        small = {"decodes": [(2, 32)], "prompts": [(1, 16, 32)]}
    for name, kv_dtype in (("bf16", None), ("e4m3", torch.float8_e4m3fn)):
        load = attention.Load(kv_dtype=kv_dtype)
        for figure in attention.figures(call.device, load, **small):
            rows.append(
                {
                    "step": figure.name,
                    "cache": name,
                    "us": figure.microseconds,
                    "of the limit": figure.share,
                }
            )
    return rows


def _operations(call: Call) -> dict[str, Any]:
    command = [sys.executable, "-m", ops.__name__, "--device", call.kind]
    if not call.large:
        command += ["--tokens", "2", "--hidden", "64", "--intermediate", "128", "--rounds", "1"]
        command += ["--copy-mib", "1"]
    return {"table": "\n\n" + call.program(command, call.out / "operations.txt")}


def _experts(call: Call) -> dict[str, Any]:
    command = [sys.executable, "-m", moe.__name__, "--device", call.kind]
    command += [] if call.large else ["--shape", "tiny"]
    return {"table": "\n\n" + call.program(command, call.out / "experts.txt")}


AT_ONCE = 8
"""Miniatures that are compared at the same time: most of their time kernels are compiled."""


def _parity(call: Call) -> dict[str, Any]:
    """Each miniature in a process of its own.

    Raises:
        AssertionError: one of them is wrong, or failed; the message has the figures of the others.
    """
    found: dict[str, Any] = {}
    wrong: list[str] = []
    names = tuple(MINIATURES) if call.large else ("attention",)

    def compare(name: str, number: int) -> dict[str, Any]:
        folder = call.folder / f"parity-{number}"
        folder.mkdir()
        command = [sys.executable, "-m", "tests.benchmarks.gpu.check", call.kind, str(folder), name]
        # Several of them share the cores, and the reference is small.
        output = call.program(command, folder / "output.txt", OMP_NUM_THREADS="1")
        figures: dict[str, Any] = json.loads(output.splitlines()[-1])
        return figures

    with ThreadPoolExecutor(AT_ONCE) as pool, (call.out / "parity.txt").open("w") as outputs:
        running = {
            pool.submit(compare, name, number): (name, number) for number, name in enumerate(names)
        }
        for future in as_completed(running):
            name, number = running[future]
            try:
                found |= future.result()
            except Exception as error:  # the others may be right
                wrong.append(f"{name}: {error}")
            output = call.folder / f"parity-{number}" / "output.txt"
            print(f"## {name}\n", output.read_text(errors="replace"), file=outputs, flush=True)
    assert not wrong, "; ".join(wrong) + f"; right: {found}"
    return found


SECTIONS = (
    Section("kernels", _kernels, 30, 150),
    Section("graphs", _graphs, 20, 60),
    Section("parity", _parity, 60, 170),
    Section("variants", _variants, 40, 100),
    Section("attention", _attention, 30, 60),
    Section("operations", _operations, 20, 60),
    Section("experts", _experts, 20, 90),
)


def main() -> None:
    kind, folder, name = sys.argv[1:]
    try:
        found = parity(Path(folder), kind, name)
    except ImportError as error:
        found = {name: f"not run: {error}"}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
