"""The memory of a sequence is what the formulas of its model's layers say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tools.cache_sizes import MODELS, computed
from tgi_cli.models import model_facts, read_config

FEW_MODULES = (
    "Qwen3.5-0.8B",
    "Qwen3.5-4B",
    "LFM2-1.2B",
    "Granite-4-H-Tiny",
    "Nemotron-3-Nano-30B-A3B",
    "Bamba-9B",
    "DeepSeek-V2-Lite",
    "GLM-4.7-Flash",
    "Gemma-3n-E4B",
    "gpt-oss-20b",
)
"""The others have thousands of experts, or are rehearsed by transformers; the tool prints all."""


@pytest.mark.parametrize("name", FEW_MODULES)
def test_a_sequence_takes_what_the_formula_says(name: str, tmp_path: Path) -> None:
    assert computed(name, tmp_path) == MODELS[name].formula
    facts = model_facts(read_config(tmp_path))
    assert facts.kv_bytes_per_token * torch.bfloat16.itemsize == MODELS[name].formula.token
