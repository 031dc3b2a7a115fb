"""A model is compared with transformers' before it is served, and a wrong one is caught."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.cases import LONGROPE, SMALL, Case
from tests.parity.families import make_checkpoint
from tests.tools.checkpoints import make_llama
from tests.tools.quantized import gptq, write_quantized
from tests.tools.thread_shards import on_shards
from tgi_cli.config import ServeConfig
from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.errors import ConfigError, ModelError
from tgi_cli.models import CausalLM, load_model, read_config
from tgi_cli.worker.cross_check import cross_check
from tgi_cli.worker.factory import load_worker

CPU = torch.device("cpu")


def check(
    path: Path,
    model: CausalLM | None = None,
    dtype: torch.dtype = torch.float32,
    shard: Shard = ALONE,
    served: int = 128,
) -> None:
    config = read_config(path)
    if model is None:
        model = load_model(config, dtype, CPU, shard=shard, max_positions=served)
    cross_check(config, model, 256, dtype, CPU, served, shard)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_correct_model_passes_the_cross_check(
    dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        check(make_llama(tmp_path), dtype=dtype)
    if dtype == torch.float32:
        assert "48 of 48 greedy tokens" in caplog.text


def test_a_model_run_by_transformers_code_passes_the_cross_check(tmp_path: Path) -> None:
    check(make_checkpoint(Case("CohereConfig", SMALL), tmp_path))


def test_factors_of_long_contexts_are_no_difference(tmp_path: Path) -> None:
    values = SMALL | {"rope_parameters": LONGROPE | {"partial_rotary_factor": 0.75}}
    case = Case("Phi3Config", values | {"original_max_position_embeddings": 100})
    path = make_checkpoint(case, tmp_path)
    check(path, served=99)
    check(path, served=192)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rms_norm_eps": 0.3},
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32},
    ],
    ids=["other angles", "other norms", "other heads"],
)
def test_a_wrong_model_fails_the_cross_check(
    overrides: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    path = make_llama(tmp_path / "right", num_key_value_heads=8)
    other = make_llama(tmp_path / "wrong", **{"num_key_value_heads": 8, **overrides})
    wrong = load_model(read_config(other), dtype, CPU)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM .*first at token \d+ of prompt 0"):
        check(path, wrong, dtype)


def test_one_wrong_weight_fails_the_cross_check(tmp_path: Path) -> None:
    path = make_llama(tmp_path, tie_word_embeddings=False)
    model = load_model(read_config(path), torch.float32, CPU)
    with torch.inference_mode():
        model.get_parameter("model.layers.2.mlp_norm.weight")[3] += 0.1
    with pytest.raises(ModelError, match="its logits are not transformers'"):
        check(path, model)


def test_nan_logits_fail_the_cross_check(tmp_path: Path) -> None:
    path = make_llama(tmp_path)
    model = load_model(read_config(path), torch.float32, CPU)
    with torch.inference_mode():
        model.get_parameter("model.norm.weight").fill_(float("nan"))
    with pytest.raises(ModelError, match="first at token 0"):
        check(path, model)


def test_the_cross_check_fails_on_all_shards(tmp_path: Path) -> None:
    right = make_llama(tmp_path / "right")
    wrong = make_llama(tmp_path / "wrong", seed=1)

    def work(shard: Shard) -> str:
        check(right, shard=shard)
        model = load_model(read_config(wrong), torch.float32, CPU, shard=shard)
        try:
            check(right, model, shard=shard)
        except ModelError as error:
            return str(error)
        return ""

    first, second = on_shards(2, work)
    assert "first at token 0" in first
    assert "the first shard found a difference" in second


def test_a_context_too_short_for_a_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="17 are served"):
        check(make_llama(tmp_path), served=17)


def test_the_flag_acts(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "plain")
    serve = ServeConfig(model_id="x", dtype="float32", cross_check=True, max_total_tokens=64)
    load_worker(serve, path)
    with pytest.raises(ConfigError, match="--load-format dummy"):
        load_worker(replace(serve, load_format="dummy"), path)
    with pytest.raises(ConfigError, match="these are quantized"):
        load_worker(replace(serve, quantize="int8"), path)
    with pytest.raises(ConfigError, match="these are quantized"):
        load_worker(replace(serve, quantize_head=True), path)
    write_quantized(path, tmp_path / "gptq", gptq(4, 32))
    with pytest.raises(ConfigError, match="these are quantized"):
        load_worker(serve, tmp_path / "gptq")
