"""GGUF files of architectures that transformers' modules run, or that share a built-in family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.parity.cases import LLAMA3_ROPE, SMALL, YARN_ROPE, Case
from tests.parity.families import Oracle, make_checkpoint
from tests.parity.generic_cases import ENGINE_CASES
from tests.parity.test_fallback import CASES as FALLBACK
from tests.parity.test_fallback import GLM_MOE
from tests.tools.gguf_files import write_gguf
from tests.tools.paged_run import PagedRun, load, random_ids
from tests.tools.thread_shards import sharded_logits
from tgi_cli.models import model_facts, read_config

TOLERANCE = 1e-4
"""Of logits in float32, whose standard deviation is about 1."""

_MINISTRAL = YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}

CASES: dict[str, Case] = {
    "AFM": Case("ArceeConfig", SMALL | {"head_dim": 12, "rope_parameters": YARN_ROPE}),
    "Command R": FALLBACK["Cohere"],
    "Command R+": Case("CohereConfig", SMALL | {"logit_scale": 0.5, "use_qk_norm": True}),
    "Command R7B": FALLBACK["Cohere 2"],
    "dots.llm1": Case("Dots1Config", GLM_MOE | {"first_k_dense_replace": 1}),
    "ERNIE 4.5": FALLBACK["ERNIE 4.5"],
    "ERNIE 4.5 MoE": ENGINE_CASES["ERNIE 4.5 MoE"],
    "EXAONE 4": FALLBACK["Exaone 4"],
    "EXAONE 4, without windows": Case(
        "Exaone4Config",
        SMALL
        | {"sliding_window": None, "layer_types": ["full_attention"] * 3}
        | {"rope_parameters": LLAMA3_ROPE},
    ),
    "GLM-4": Case("GlmConfig", SMALL | {"head_dim": 16, "attention_bias": True}),
    "GLM-4-0414": FALLBACK["GLM 4"],
    "GLM-4.5": FALLBACK["GLM 4.5 MoE"],
    "GLM-4.5 with norms": Case(
        "Glm4MoeConfig",
        GLM_MOE | {"first_k_dense_replace": 1, "head_dim": 16, "use_qk_norm": True},
    ),
    "Granite 3 MoE": ENGINE_CASES["Granite MoE"],
    "HunYuan": Case("HunYuanDenseV1Config", SMALL | {"head_dim": 16}),
    "MiniMax M2": Case(
        "MiniMaxM2Config",
        SMALL | {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "Ministral 3": Case(
        "Ministral3Config", SMALL | {"head_dim": 16, "rope_parameters": _MINISTRAL}
    ),
    "Mistral Small 3": Case("MistralConfig", SMALL | {"head_dim": 24, "sliding_window": None}),
    "Nemotron 4": Case("NemotronConfig", SMALL),
    "OLMo": FALLBACK["OLMo"],
    "OLMoE": FALLBACK["OLMoE"],
    "Phi-2": FALLBACK["Phi"],
    "StableLM": Case("StableLmConfig", SMALL | {"use_qkv_bias": True}),
    "StableLM, parallel": replace(
        FALLBACK["StableLM"],
        values={**FALLBACK["StableLM"].values, "use_parallel_residual": True},
    ),
}

UNSHARED = ("Command R+", "HunYuan", "StableLM", "StableLM, parallel")
"""Those that transformers does not say how to share out, or not all of."""


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    plain, path, twin = (tmp_path / each for each in ("plain", "gguf", "twin"))
    case = CASES[name]
    make_checkpoint(case, plain)
    write_gguf(plain, path, "Q8_0", twin)
    assert model_facts(read_config(path)).quantization == "gguf"
    ids = random_ids(100, seed=1)
    wanted = Oracle(twin, case).logits(ids)
    got = PagedRun(load(path), torch.float32, "torch").step({"a": ids})["a"]
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)
    assert wanted.std() > 0.1, "the tolerance is to mean something"
    if name not in UNSHARED:
        for logits in sharded_logits(path, 2, [ids]):
            torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=0)


def test_codes_are_kept_within_modules_of_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By our kernels, in bfloat16."""
    plain, path, twin = (tmp_path / each for each in ("plain", "gguf", "twin"))
    case = CASES["Command R"]
    write_gguf(make_checkpoint(case, plain), path, "Q4_0", twin)
    with caplog.at_level("INFO", logger="tgi_cli"):
        model = load(path, torch.bfloat16)
    assert "our kernels for 4 bits" in caplog.text
    assert "are kept in bfloat16" not in caplog.text
    ids = random_ids(60, seed=2)
    wanted = Oracle(twin, case).logits(ids)
    got = PagedRun(model, torch.bfloat16, None).step({"a": ids})["a"]
    dense = PagedRun(load(twin, torch.bfloat16), torch.bfloat16, None).step({"a": ids})["a"]
    assert (got - wanted).norm() < 1.2 * (dense - wanted).norm()


def test_experts_that_modules_have_in_stacks_are_dequantized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, path = tmp_path / "plain", tmp_path / "gguf"
    write_gguf(make_checkpoint(CASES["OLMoE"], plain), path, "Q8_0")
    with caplog.at_level("INFO", logger="tgi_cli"):
        load(path, torch.bfloat16)
    experts = CASES["OLMoE"].values["num_experts"] * CASES["OLMoE"].values["num_hidden_layers"]
    assert f"{3 * experts} quantized weights are kept in bfloat16" in caplog.text
