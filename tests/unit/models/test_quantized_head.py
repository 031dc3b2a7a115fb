"""An output head that is quantized to 8 or 4 bits, whatever the other weights are in."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.tools import quantized
from tests.tools.checkpoints import make_llama, save_weights
from tests.tools.paged_run import PagedRun, random_ids
from tests.tools.thread_shards import on_shards
from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.kernels import cpp_library, without_cpp_kernels
from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.models import CausalLM, load_model, read_config
from tgi_cli.quantization import bitsandbytes, quantized_weight
from tgi_cli.quantization.quantized_weight import quantize_int8

CPU = torch.device("cpu")
PROMPT = random_ids(20, seed=1)

PADDED = 256 * 64
"""Numbers of the head in the kernels' order; scales are of 4 bytes each."""

needs_kernels = pytest.mark.skipif(
    cpp_library() is None, reason="the kernels are not compiled here"
)


def make(path: Path, tied: bool, vocab_size: int = 251) -> Path:
    """A model in bfloat16 of which each row's largest weight is 127 / 256.

    Its codes times their scale are then bfloat16 numbers.
    """
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    make_llama(path, dtype=torch.bfloat16, tie_word_embeddings=tied, vocab_size=vocab_size)
    weights = load_file(path / "model.safetensors")
    head = weights[name]
    head.clamp_(-0.4, 0.4)[:, 5] = 127 / 256
    save_weights(path, weights)
    return path


def twin_of(path: Path, twin: Path, bits: int = 8) -> Path:
    """The same with a head that is plain, and what the codes of the other's stand for."""
    shutil.copytree(path, twin)
    weights = load_file(path / "model.safetensors")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    codes = quantize_int8(head) if bits == 8 else bitsandbytes.quantize("nf4", head)
    weights["lm_head.weight"] = codes.dequantize(torch.float32)
    assert not torch.equal(weights["lm_head.weight"], head.float())
    config = json.loads((twin / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    save_weights(twin, weights)
    return twin


def load(
    path: Path,
    dtype: torch.dtype = torch.bfloat16,
    quantize: str | None = None,
    shard: Shard = ALONE,
    head_bits: int | None = 8,
) -> CausalLM:
    config = read_config(path)
    return load_model(config, dtype, CPU, shard=shard, quantize=quantize, head_bits=head_bits)


def said(model: CausalLM, dtype: torch.dtype) -> tuple[list[int], Tensor]:
    """Greedy tokens after the prompt, and all logits on the way."""
    run = PagedRun(model, dtype, None if dtype == torch.bfloat16 else "torch")
    logits = [run.step({"a": PROMPT})["a"]]
    tokens: list[int] = []
    for _ in range(10):
        tokens.append(int(logits[-1][-1].argmax()))
        logits.append(run.step({"a": tokens[-1:]})["a"])
    return tokens, torch.cat(logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_quantized_head_computes_with_the_values_of_its_codes(
    shards: int, tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = make(tmp_path / "plain", tied)
    twin = twin_of(path, tmp_path / "twin")

    def run(checkpoint: Path, head_bits: int | None) -> tuple[list[int], Tensor]:
        def work(shard: Shard) -> tuple[list[int], Tensor]:
            model = load(checkpoint, dtype, shard=shard, head_bits=head_bits)
            return said(model, dtype)

        first, *others = on_shards(shards, work)
        assert all(torch.equal(other, first[1]) for _, other in others)
        return first

    tokens, wanted = run(twin, None)
    got, logits = run(path, 8)
    assert got == tokens
    torch.testing.assert_close(logits, wanted, rtol=2**-7, atol=2**-7)
    assert not torch.equal(run(path, None)[1], logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_head_of_4_bits_computes_with_the_values_of_its_codes(
    shards: int, tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = make(tmp_path / "plain", tied)
    twin = twin_of(path, tmp_path / "twin", 4)

    def logits(checkpoint: Path, head_bits: int | None) -> Tensor:
        def work(shard: Shard) -> Tensor:
            run = PagedRun(
                load(checkpoint, dtype, shard=shard, head_bits=head_bits),
                dtype,
                None if dtype == torch.bfloat16 else "torch",
            )
            return run.step({"a": PROMPT})["a"]

        return on_shards(shards, work)[0]

    got, wanted, plain = logits(path, 4), logits(twin, None), logits(path, None)
    # The kernel rounds its table to bfloat16, the twin its weights.
    error, step = (got - wanted).square().mean(), (plain - wanted).square().mean()
    assert error < 0.01 * step
    assert step < 0.05 * plain.square().mean()


@needs_kernels
@pytest.mark.parametrize(
    ("bits", "kind", "saved"),
    [(8, "integers of 8 bits", PADDED - 4 * 256), (4, "nf4", PADDED * 3 // 2 - 4 * 256)],
)
@pytest.mark.parametrize("quantize", [None, "int8", "fp8", "bitsandbytes-nf4"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_head_takes_less_memory_and_vectors_stay(
    tied: bool,
    quantize: str | None,
    bits: int,
    kind: str,
    saved: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = make(tmp_path, tied)
    with caplog.at_level(logging.INFO):
        model = load(path, quantize=quantize, head_bits=bits)
    plain = load(path, quantize=quantize, head_bits=None)
    head = model.get_submodule("lm_head")
    assert isinstance(head.packed, PackedMatrix)  # what the short way to logits takes
    assert head.packed.bits == bits
    assert plain.weight_bytes - model.weight_bytes == saved
    ids = torch.arange(251)
    vectors = model.get_submodule("model.embed_tokens")(ids)
    stored = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(vectors, stored)
    line = f"the output head is in {kind} (--quantize-head), computed with by our kernels"
    assert caplog.text.count(f"{line} for {bits} bits") == 1


def test_the_plain_head_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    plain = make(tmp_path / "plain", tied=False)
    path, twin = tmp_path / "quantized", tmp_path / "twin"
    quantized.write_quantized(plain, path, quantized.gptq(4, 32), twin=twin)
    tokens, wanted = said(
        load(twin_of(twin, tmp_path / "both"), torch.float32, head_bits=None), torch.float32
    )
    got, logits = said(load(path, torch.float32), torch.float32)
    assert got == tokens
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_a_quantized_head_of_a_checkpoint_stays_quantized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, path = make(tmp_path / "plain", tied=False, vocab_size=256), tmp_path / "quantized"
    quantized.write_quantized(plain, path, quantized.gptq(4, 32), modules="lm_head")
    with caplog.at_level(logging.INFO):
        model = load(path)
    as_stored = load(path, head_bits=None)
    assert model.weight_bytes == as_stored.weight_bytes
    hidden = torch.randn(3, 64).bfloat16()
    logits = model.logits(hidden)
    assert torch.equal(logits, as_stored.logits(hidden))
    assert "--quantize-head changes nothing: the checkpoint's output head is quantized" in (
        caplog.text
    )


def test_dequantized_weights_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make(tmp_path, tied=True)
    with caplog.at_level(logging.INFO), without_cpp_kernels():
        model = load(path, torch.float32)
    stored = load_file(path / "model.safetensors")["model.embed_tokens.weight"].float()
    assert torch.equal(model.get_submodule("model.embed_tokens")(torch.arange(251)), stored)
    assert "to float32, which saves nothing: there are kernels for bfloat16" in caplog.text


def test_a_head_is_quantized_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(100, 24)
    kept = weight.clone()
    whole = quantize_int8(weight)
    monkeypatch.setattr(quantized_weight, "QUANTIZED_ELEMENTS", 24 * 7)
    pieces = quantize_int8(weight)
    assert torch.equal(weight, kept)
    assert torch.equal(pieces.codes, whole.codes)
    assert torch.equal(pieces.scales, whole.scales)
    assert (whole.dequantize(torch.float32) - weight).abs().max() <= whole.scales.max() * 0.51


@pytest.mark.parametrize("inputs", [64, 24])
def test_nf4_is_rounded_a_few_rows_at_a_time(inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(100, inputs)
    whole = bitsandbytes.quantize("nf4", weight)
    monkeypatch.setattr(bitsandbytes, "QUANTIZED_ELEMENTS", inputs * 7)
    pieces = bitsandbytes.quantize("nf4", weight)
    assert torch.equal(pieces.codes, whole.codes)
    assert torch.equal(pieces.scales, whole.scales)
    widest = 0.5 * (1 - 0.6961928)  # half of the largest distance of two values
    assert ((whole.dequantize(torch.float32) - weight).abs() <= whole.scales * widest + 1e-6).all()
