"""Experts that a checkpoint has in stacks are quantized one by one, and so they are written."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.parity import test_fallback
from tests.parity.cases import CASES, SMALL, Case
from tests.parity.families import random_ids
from tests.parity.test_quantize import AWQ, BYTES, GPTQ, RTN, check_served, job
from tests.tools.miniatures import make_miniature
from tests.tools.paged_run import CPU
from tgi_cli.errors import ConfigError
from tgi_cli.models.checkpoint import read_headers, read_tensor
from tgi_cli.quantization.algorithms.recipe import Recipe
from tgi_cli.quantize import pipeline as jobs
from tgi_cli.quantize.checkpoint_map import is_expert_stack
from tgi_cli.quantize.evaluation import evaluate
from tgi_cli.quantize.gptq import BlockTask
from tgi_cli.quantize.offloaded_model import OffloadedModel
from tgi_cli.quantize.pipeline import QuantizeResult, quantize

EVERY = CASES | test_fallback.CASES


def stacked(plain: Path, out: Path) -> Path:
    """The same model as transformers writes it when it does not restore published names."""
    model = AutoModelForCausalLM.from_pretrained(plain)
    model.save_pretrained(out, save_original_format=False)
    for file in plain.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, out / file.name)
    return out


def both(name: str, folder: Path) -> tuple[Path, Path]:
    """A miniature with experts one by one, and in stacks."""
    plain = make_miniature(EVERY[name], folder / "plain")
    return plain, stacked(plain, folder / "stacked")


def stacks(path: Path) -> list[str]:
    return [name for name, entry in read_headers(path).items() if is_expert_stack(name, entry)]


def written(path: Path) -> dict[str, Tensor]:
    return {name: read_tensor(entry) for name, entry in read_headers(path).items()}


def check_same(first: Path, second: Path) -> None:
    """All but the model card, which names what it was made from."""
    names = {file.name for file in first.iterdir()} - {"README.md"}
    assert names == {file.name for file in second.iterdir()} - {"README.md"}
    assert any(name.endswith(".safetensors") for name in names)
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("Mixtral", GPTQ),
        ("Mixtral", Recipe(method="int8", **BYTES)),  # type: ignore[arg-type]
        ("Qwen 2 MoE", AWQ),
        ("Qwen 2 MoE", Recipe(method="fp8", **BYTES)),  # type: ignore[arg-type]
        ("Qwen 3 MoE", replace(GPTQ, bits=8, format="gptq_v2")),
        ("GLM 4.5 MoE", replace(GPTQ, format="compressed-tensors")),
    ],
)
def test_stacked_experts_are_quantized_like_single_ones(
    name: str, recipe: Recipe, tmp_path: Path
) -> None:
    plain, whole = both(name, tmp_path)
    assert stacks(whole)
    assert not stacks(plain)
    outcome = quantize(job(whole, tmp_path / "out", recipe, samples=4))
    check_same(outcome.path, quantize(job(plain, tmp_path / "wanted", recipe, samples=4)).path)
    experts = [layer.name for layer in outcome.layers if ".experts." in layer.name]
    assert len(experts) > len(stacks(whole))
    check_served(EVERY[name], plain, outcome.path, tmp_path / "twin")


def test_unquantized_experts_are_written_one_by_one(tmp_path: Path) -> None:
    """Also in files of their own, and with a layer that the format has no room for."""
    plain, whole = both("Qwen 3 MoE", tmp_path)
    options = {"samples": 2, "exclude": ("*.experts.1.*",), "shard_bytes": 20_000}
    recipe = replace(GPTQ, group_size=64)  # intermediate sizes are no multiple of that
    outcome = quantize(job(whole, tmp_path / "out", recipe, **options))
    check_same(outcome.path, quantize(job(plain, tmp_path / "wanted", recipe, **options)).path)
    left = {name for name in outcome.ignored if ".experts." in name}
    assert any(".experts.1.gate_proj" in name for name in left)
    original = written(plain)
    for name in left:
        assert torch.equal(written(outcome.path)[f"{name}.weight"], original[f"{name}.weight"])
    assert not stacks(outcome.path)
    check_served(EVERY["Qwen 3 MoE"], plain, outcome.path, tmp_path / "twin")


def test_experts_that_few_tokens_reach_are_named(tmp_path: Path) -> None:
    _, whole = both("Qwen 3 MoE", tmp_path)
    outcome = quantize(job(whole, tmp_path / "out", GPTQ, samples=1, seq_len=128))
    few = [layer for layer in outcome.layers if layer.note]
    assert few
    assert all("calibrated with all of a batch" in layer.note for layer in few)
    card = (outcome.path / "README.md").read_text()
    assert f"- {few[0].name}: {few[0].note}" in card


def test_a_run_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, whole = both("Mixtral", tmp_path)
    wanted = quantize(job(plain, tmp_path / "wanted", GPTQ, samples=2)).path
    real: Callable[[BlockTask], None] = jobs.CALIBRATED["gptq"]

    def stop(work: BlockTask) -> None:
        if work.index == 1:
            raise KeyboardInterrupt
        real(work)

    with monkeypatch.context() as patched:
        patched.setitem(jobs.CALIBRATED, "gptq", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize(job(whole, tmp_path / "out", GPTQ, samples=2))
    with pytest.raises(ConfigError, match="had other model"):
        quantize(job(plain, tmp_path / "out", GPTQ, samples=2, resume=True))
    check_same(quantize(job(whole, tmp_path / "out", GPTQ, samples=2, resume=True)).path, wanted)


GRANITE = Case("GraniteMoeConfig", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2})


@pytest.mark.parametrize(
    ("case", "first"),
    [
        (CASES["gpt-oss"], "model.layers.0.mlp.experts.down_proj"),
        (GRANITE, "model.layers.0.block_sparse_moe.input_linear.weight"),
    ],
)
def test_stacks_of_families_that_publish_them_stay_plain_and_are_named(
    case: Case, first: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_miniature(case, tmp_path / "plain")
    with caplog.at_level(logging.WARNING):
        outcome: QuantizeResult = quantize(job(plain, tmp_path / "out", RTN))
    count = len(stacks(plain))
    assert f"{first} and {count - 1} more: not quantized" in caplog.text
    assert stacks(outcome.path) == stacks(plain)
    assert all("self_attn" in layer.name for layer in outcome.layers)
    check_served(case, plain, outcome.path, tmp_path / "twin")


def test_a_model_in_stacks_is_evaluated(tmp_path: Path) -> None:
    plain, whole = both("Mixtral", tmp_path)
    stored = OffloadedModel(whole, CPU).stored
    assert stored.keys() == read_headers(plain).keys()
    assert stored["model.layers.0.block_sparse_moe.experts.3.w2.weight"].part == (3, 0, 64)
    rounded = quantize(job(whole, tmp_path / "out", RTN)).path
    ids = torch.tensor([random_ids(40, seed) for seed in range(2)])
    assert evaluate(whole, whole, ids, CPU).kl == 0
    assert evaluate(whole, rounded, ids, CPU).kl == evaluate(plain, rounded, ids, CPU).kl > 0
