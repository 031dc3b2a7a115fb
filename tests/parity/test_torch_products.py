"""Where a model is said to have no products of torch's, torch computes none in bfloat16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.parity.cases import CASES
from tests.parity.checkpoints import make_checkpoint
from tests.parity.generic_cases import ENGINE_CASES
from tests.parity.vision import VisionOracle
from tests.parity.vision_cases import VISION_CASES
from tests.tools.paged_run import CPU, PagedRun, load, random_ids
from tests.tools.torch_products import BFloat16Products
from tgi_cli.config import ServeConfig
from tgi_cli.kernels import cpp_library
from tgi_cli.kernels.facts import describe_device
from tgi_cli.models import load_model, model_facts, read_config
from tgi_cli.models.hf import float32_products
from tgi_cli.worker import factory
from tgi_cli.worker.factory import resolve_config

pytestmark = pytest.mark.skipif(cpp_library() is None, reason="the kernels are not compiled")

OURS = ("Doge", "DiffLlama", "GPT-J", "GPT-Neo", "CodeGen", "MPT", "BART", "RoBERTa")
"""Of transformers' models, those whose products our layers compute."""

BUILT_IN = ("Llama 3", "Gemma 3n", "Mixtral", "Qwen3-Next", "DeepSeek V3", "gpt-oss", "LFM 2")
TOWERS = ("SmolVLM", "Gemma 3", "Qwen2-VL", "LFM3-VL")


@pytest.mark.parametrize("name", [*OURS, *BUILT_IN])
def test_our_layers_compute_all_products(name: str, tmp_path: Path) -> None:
    path = make_checkpoint({**CASES, **ENGINE_CASES}[name], tmp_path)
    assert not model_facts(read_config(path)).torch_products
    run = PagedRun(load(path, torch.bfloat16), torch.bfloat16, None)
    with BFloat16Products() as products:
        run.step({"a": random_ids(20, 0), "b": random_ids(7, 1)})
        run.step({"a": random_ids(1, 2), "b": random_ids(1, 3)})
    assert not products.found


@pytest.mark.parametrize("name", ["Mamba", "BLOOM", "DBRX", "Granite MoE", "A.X K2"])
def test_torch_computes_states_experts_and_what_reads_weights(name: str, tmp_path: Path) -> None:
    path = make_checkpoint(ENGINE_CASES[name], tmp_path)
    assert model_facts(read_config(path)).torch_products
    run = PagedRun(load(path, torch.bfloat16), torch.bfloat16, None)
    with BFloat16Products() as products:
        run.step({"a": random_ids(20, 0)})
    assert products.found


@pytest.mark.parametrize(("name", "expected"), [("Llama 3", "bfloat16"), ("Mamba", "float32")])
def test_the_default_dtype_follows(
    name: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor without instructions for bfloat16."""
    path = make_checkpoint({**CASES, **ENGINE_CASES}[name], tmp_path)
    device = replace(describe_device("cpu"), native_bfloat16=False)
    monkeypatch.setattr(factory, "describe_device", lambda _: device)
    serve = ServeConfig(model_id="m")
    assert resolve_config(serve, path)[0].dtype == expected
    monkeypatch.setattr(factory, "describe_device", lambda _: replace(device, kernels=False))
    assert resolve_config(serve, path)[0].dtype == "float32"


@pytest.mark.parametrize("name", TOWERS)
def test_towers_have_none_where_they_are_slow(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float32_products, "ONEDNN_DTYPES", frozenset({torch.float32}))
    case = VISION_CASES[name]
    path = make_checkpoint(case.case, tmp_path)
    image = case.image(0)
    tower = load_model(read_config(path), torch.bfloat16, CPU).vision
    assert tower is not None
    with BFloat16Products() as products:
        tower.encode(image, len(VisionOracle(path, case).features(image)))
    assert not products.found
