"""Activations of 8 bits in products with integers: the default where the CPU multiplies bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.cases import CASES
from tests.parity.families import make_checkpoint
from tests.tools import quantized
from tests.tools.checkpoints import make_llama
from tests.tools.miniatures import write_byte_tokenizer
from tests.tools.paged_run import CPU, PagedRun, expected, load, random_ids
from tests.tools.quantized import write_quantized
from tests.tools.thread_shards import on_shards
from tests.unit.quantization.test_formats import LAYOUTS
from tgi_cli import LLM, SamplingParams
from tgi_cli.config import ServeConfig
from tgi_cli.device.distributed import Shard
from tgi_cli.errors import ConfigError
from tgi_cli.kernels import without_cpp_kernels
from tgi_cli.kernels.linear import multiplies_bytes
from tgi_cli.models import load_model, read_config
from tgi_cli.worker.factory import load_worker, resolve_config

INTEGERS = (
    "gptq 2 bits with zeros",
    "gptq 4 bits, groups of 32",
    "gptq 8 bits with zeros",
    "gptq, activation order",
    "awq",
    "pack-quantized per row",
    "pack-quantized with zeros",
    "int-quantized",
    "bitsandbytes",
)
OTHERS = ("fp8 by channel", "float-quantized by channel", "bitsandbytes nf4", "nvfp4 of modelopt")
SERVE = ServeConfig(model_id="x", dtype="bfloat16", max_batch_total_tokens=64)

ROUNDED = "activations are rounded to 8 bits in products with integers"
KERNEL = ", activations of 8 bits"

needs_bytes = pytest.mark.skipif(
    not multiplies_bytes(), reason="this processor does not multiply bytes"
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), intermediate_size=192)


def logged(serve: ServeConfig, path: Path, caplog: pytest.LogCaptureFixture) -> tuple[bool, str]:
    """Load a worker; whether the settings round activations, and the lines of its log."""
    caplog.clear()
    with caplog.at_level("INFO", logger="tgi_cli"):
        worker, config = load_worker(serve, path)
    worker.close()
    return config.quantize_activations, caplog.text


def check(rounds: bool, serve: ServeConfig, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Check what the settings and the log say of activations, by default and without rounding."""
    rounds = rounds and multiplies_bytes()
    setting, lines = logged(serve, path, caplog)
    assert (setting, ROUNDED in lines, KERNEL in lines) == (rounds, rounds, rounds)
    setting, lines = logged(replace(serve, quantize_activations=False), path, caplog)
    assert (setting, ROUNDED in lines, KERNEL in lines) == (False, False, False)


@pytest.mark.parametrize("name", [*INTEGERS, *OTHERS])
def test_they_are_the_default_of_checkpoints_with_integers(
    name: str, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_quantized(llama, tmp_path, LAYOUTS[name])
    check(name in INTEGERS, SERVE, tmp_path, caplog)


@pytest.mark.parametrize(
    ("settings", "rounds"),
    [
        ({}, False),
        ({"quantize": "int8"}, True),
        ({"quantize": "eetq"}, True),
        ({"quantize": "bitsandbytes"}, True),
        ({"quantize": "bitsandbytes-nf4"}, False),
        ({"quantize": "fp8"}, False),
        ({"quantize_head": True}, True),
        ({"quantize": "fp8", "quantize_head_bits": 8}, True),
        ({"quantize_head_bits": 4}, False),
    ],
)
def test_they_are_the_default_of_what_is_quantized_to_integers_on_load(
    settings: dict[str, Any], rounds: bool, llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check(rounds, replace(SERVE, **settings), llama, caplog)


def test_they_keep_their_bits_where_there_are_no_kernels(llama: Path) -> None:
    serve = replace(SERVE, quantize="int8")
    for dtype in ("float16", "float32"):
        assert not resolve_config(replace(serve, dtype=dtype), llama)[0].quantize_activations
    with without_cpp_kernels():
        assert not resolve_config(serve, llama)[0].quantize_activations
    assert resolve_config(serve, llama)[0].quantize_activations == multiplies_bytes()


@needs_bytes
def test_they_keep_their_bits_where_integers_are_dequantized(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_quantized(llama, tmp_path, quantized.gptq(4, 8))
    setting, lines = logged(SERVE, tmp_path, caplog)
    assert setting
    assert "quantized weights are dequantized to bfloat16" in lines
    assert "activations keep 16 bits: no product is one with integers" in lines


def test_to_request_them_needs_integers_and_kernels(llama: Path) -> None:
    serve = replace(SERVE, quantize_activations=True)
    with pytest.raises(ConfigError, match="--quantize-activations: the model has no weights in"):
        load_worker(replace(serve, quantize="fp8"), llama)
    with pytest.raises(ConfigError, match="--quantize-activations needs bfloat16"):
        load_worker(replace(serve, quantize="int8", dtype="float32"), llama)


@needs_bytes
@pytest.mark.parametrize(
    ("name", "family"), [*((name, "Llama 3") for name in INTEGERS), (INTEGERS[1], "Mixtral")]
)
def test_they_cost_little_and_depend_on_no_other_token(
    name: str, family: str, tmp_path: Path
) -> None:
    """Neither of other sequences nor of chunks, compiled or not."""
    plain, path, twin = (tmp_path / each for each in ("plain", "quantized", "twin"))
    write_quantized(make_checkpoint(CASES[family], plain), path, LAYOUTS[name], twin=twin)
    ids, others = random_ids(60, seed=1), random_ids(45, seed=2)
    wanted = expected(twin, ids)

    def logits(input_bits: int, cuts: tuple[int, ...], eager: bool = False) -> Tensor:
        model = load(path, torch.bfloat16, input_bits)
        run = PagedRun(model, torch.bfloat16, None, eager=eager)
        assert (run.program is None) == (eager or "activation order" in name)
        pieces = [ids[begin:end] for begin, end in pairwise([0, *cuts, len(ids)])]
        return torch.cat([run.step({"a": piece, "b": others[:7]})["a"] for piece in pieces])

    rounded = logits(8, (30, 59))
    assert torch.equal(rounded, logits(8, (1, 2, 10, 22)))
    assert torch.equal(rounded, logits(8, (), eager=True))
    error = (rounded - wanted).abs().median()
    least = (logits(16, ()) - wanted).abs().median()
    assert 1.1 * least < error < 8 * least


@needs_bytes
@pytest.mark.parametrize("name", ["gptq 4 bits, groups of 32", "int-quantized"])
def test_they_cost_little_on_two_shards(name: str, llama: Path, tmp_path: Path) -> None:
    path, twin = tmp_path / "quantized", tmp_path / "twin"
    write_quantized(llama, path, LAYOUTS[name], twin=twin)
    ids = random_ids(60, seed=1)
    wanted = expected(twin, ids)

    def logits(input_bits: int) -> Tensor:
        def work(shard: Shard) -> Tensor:
            config = read_config(path)
            model = load_model(config, torch.bfloat16, CPU, shard=shard, input_bits=input_bits)
            return PagedRun(model, torch.bfloat16, None).step({"a": ids})["a"]

        first, second = on_shards(2, work)
        assert torch.equal(first, second)
        return first

    error, least = ((logits(bits) - wanted).abs().median() for bits in (8, 16))
    assert 1.1 * least < error < 8 * least


@needs_bytes
def test_they_are_the_same_on_two_stages(tmp_path: Path) -> None:
    write_byte_tokenizer(make_llama(tmp_path, num_hidden_layers=4))
    greedy = SamplingParams(temperature=0.0)

    def answers(**settings: Any) -> list[Any]:
        limits: dict[str, Any] = {"dtype": "bfloat16", "max_total_tokens": 96, "speculate": 0}
        with LLM(tmp_path, quantize="int8", **(limits | settings)) as llm:
            done = llm.generate(["some text", "and more"], greedy, max_new_tokens=24)
        return [(each.token_ids, each.logprobs) for each in done]

    whole = answers(quantize_activations=True)
    assert answers() == whole
    assert answers(pipeline_parallel_size=2) == whole
    assert answers(quantize_activations=False) != whole
