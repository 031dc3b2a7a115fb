"""Measure what products with quantized weights lose by rounding activations.

    python -m tests.benchmarks.activations [--model FOLDER] [--windows 24]

Logits of the bundled model (or another one with a tokenizer.json) over the held-out text: in
float32, with the kernels for bfloat16, and with 8-bit activations, the default of ``tgi serve``
with these weights (``--no-quantize-activations`` keeps 16). Of "head in int8" only the output head
is quantized, as by ``--quantize-head``.
Figures are mean KL divergences in nats per token, from float32 with the same quantized weights and
from float32 with the original ones, and how often the most likely token is that of the original.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tests.tools.gguf_files import write_gguf
from tests.tools.paged_run import CPU, PagedRun
from tests.tools.quantized import gptq, int_quantized, write_quantized
from tgi_cli import demo
from tgi_cli.models import load_model, read_config

WINDOW = 192

HEAD = "bfloat16, head in int8"
"""The original with a quantized output head."""

GGUF_TYPES = ("Q4_0", "Q5_1", "Q8_0")
"""Those that Python can quantize to: with groups of 32, and one with minima."""


def windows(model: Path, count: int) -> list[list[int]]:
    """Return token ids of pieces of the held-out text."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(demo.heldout_text(), add_special_tokens=False).ids
    step = max(WINDOW, (len(ids) - WINDOW) // count)
    return [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW, step)][:count]


def logits(
    model: Path,
    dtype: torch.dtype,
    input_bits: int,
    texts: list[list[int]],
    head_bits: int | None = None,
) -> Tensor:
    """Return the log-probabilities of all positions, [windows * length, vocab]."""
    config = read_config(model)
    loaded = load_model(config, dtype, CPU, input_bits=input_bits, head_bits=head_bits)
    found = []
    for ids in texts:
        run = PagedRun(loaded, dtype, "torch" if dtype == torch.float32 else None)
        found.append(run.step({"a": ids})["a"].float().log_softmax(-1))
    return torch.cat(found)


def divergence(wanted: Tensor, found: Tensor) -> float:
    """Return the mean KL divergence in nats."""
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


def rows(model: Path, folder: Path, texts: list[list[int]]) -> Iterator[str]:
    """Quantize the model and yield the lines of the table."""
    original = logits(model, torch.float32, 16, texts)
    layouts = {"int8, a scale per row": int_quantized(), "int4, groups of 64": gptq(4, 64)}
    paths = {"bfloat16": model, HEAD: model}
    for name, layout in layouts.items():
        paths[name] = folder / name.split(",")[0]
        write_quantized(model, paths[name], layout)
    for name in GGUF_TYPES:
        paths[f"GGUF, {name}"] = write_gguf(model, folder / name, name)
    for name, path in paths.items():
        head_bits = 8 if name == HEAD else None
        same = logits(path, torch.float32, 16, texts, head_bits)
        for bits in (16,) if name == "bfloat16" else (16, 8):
            found = logits(path, torch.bfloat16, bits, texts, head_bits)
            agreement = (found.argmax(-1) == original.argmax(-1)).float().mean()
            yield (
                f"| {name} | {bits} bits | {divergence(same, found):.2e} | "
                f"{divergence(original, found):.2e} | {agreement:.4f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=demo.model_path())
    parser.add_argument("--windows", type=int, default=24)
    options = parser.parse_args()
    texts = windows(options.model, options.windows)
    print(f"{len(texts)} windows of {WINDOW} tokens\n")
    print("| weights | activations | KL from the same weights | KL from the original | top-1 |")
    print("|---" * 5 + "|")
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(options.model, Path(folder), texts):
            print(row, flush=True)


if __name__ == "__main__":
    main()
