"""Quantized checkpoints against transformers' model of what their tensors stand for.

In float32 weights are dequantized as they are loaded, so that all there is between a checkpoint
and its logits is exact; kernels for bfloat16 are compared with dense weights in bfloat16, with
activations of 16 bits. Those of 8 bits are in test_quantized_activations.py.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parity import test_fallback
from tests.parity.cases import CASES
from tests.parity.engine_run import NEW, run_engine
from tests.parity.families import Oracle, make_checkpoint, prompts_of
from tests.parity.test_lora import Models
from tests.tools import quantized
from tests.tools.checkpoints import make_llama
from tests.tools.lora_adapters import make_adapter
from tests.tools.paged_run import CPU, PagedRun, expected, load, random_ids
from tests.tools.quantized import Layout, write_quantized
from tests.tools.thread_shards import on_shards, sharded_logits
from tests.unit.quantization.test_formats import LAYOUTS
from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.layers.lora import LoraTable
from tgi_cli.models import load_model, model_facts, read_config
from tgi_cli.models.lora import lora_targets, read_adapter

TOLERANCE = 1e-4
"""Of logits in float32, whose standard deviation is about 1."""

GPTQ = quantized.gptq(4, 32, sym=False, desc_act=True)

SERVED = (
    "gptq 3 bits with zeros",
    "gptq 8 bits with zeros",
    "gptq, activation order",
    "gptq without g_idx",
    "awq",
    "pack-quantized with zeros",
    "pack-quantized, activation order",
    "int-quantized",
    "float-quantized by channel",
    "fp8 by block",
    "fp8 by tensor",
    "fp8, inverse scales",
    "nvfp4 of modelopt",
    "nvfp4 of compressed-tensors",
    "bitsandbytes",
    "bitsandbytes nf4, nested",
    "bitsandbytes fp4",
)

DEEPSEEK = replace(
    CASES["DeepSeek V3"],
    values=CASES["DeepSeek V3"].values | {"kv_lora_rank": 32, "q_lora_rank": 64, "v_head_dim": 16},
)
"""With sizes that divide into groups."""

FAMILIES = {
    "Llama 3": CASES["Llama 3"],
    "Qwen 2": CASES["Qwen 2"],
    "Phi-3": CASES["Phi-3"],
    "Falcon, grouped": CASES["Falcon, grouped"],
    "GPT-2": CASES["GPT-2"],
    "Mixtral": CASES["Mixtral"],
    "Qwen 3 MoE": CASES["Qwen 3 MoE"],
    "Qwen 3.5": CASES["Qwen 3.5"],
    "Qwen3-Next": CASES["Qwen3-Next"],
    "DeepSeek V3": DEEPSEEK,
    "Cohere": test_fallback.CASES["Cohere"],
    "OLMoE": test_fallback.CASES["OLMoE"],
}
"""Merged parts, biases, parts of one stored module in rows and in turns, transposed weights,
experts, linear attention beside plain gates, and models of transformers' with our layers."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    return make_llama(path, intermediate_size=192, num_key_value_heads=4)


@pytest.mark.tgi_pain(12)
@pytest.mark.parametrize("name", SERVED)
def test_formats(name: str, llama: Path, tmp_path: Path) -> None:
    path, twin = tmp_path / "quantized", tmp_path / "twin"
    write_quantized(llama, path, LAYOUTS[name], twin=twin)
    ids = random_ids(40, seed=1)
    wanted = expected(twin, ids)
    got = PagedRun(load(path), torch.float32, "torch").step({"a": ids})["a"]
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)
    assert (wanted - expected(llama, ids)).abs().max() > 10 * TOLERANCE, (
        "it is to make a difference"
    )
    for logits in sharded_logits(path, 2, [ids]):
        torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plain, path, twin = (tmp_path / each for each in ("plain", "quantized", "twin"))
    case = FAMILIES[name]
    make_checkpoint(case, plain)
    layout = _transposed(GPTQ) if name == "GPT-2" else GPTQ
    write_quantized(plain, path, layout, twin=twin)
    assert model_facts(read_config(path)).quantization == "gptq"
    ids = random_ids(40, seed=1)
    wanted = Oracle(twin, case).logits(ids)
    got = PagedRun(load(path), torch.float32, "torch").step({"a": ids})["a"]
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)
    assert (
        "quantized weights are dequantized to float32: there are kernels for bfloat16"
        in caplog.text
    )
    assert ("as parts of larger ones" in caplog.text) == (name in ("OLMoE", "DeepSeek V3"))
    for logits in sharded_logits(path, 2, [ids]):
        torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["fp8 by block", "awq", "pack-quantized with zeros"])
def test_linear_attention_in_other_formats(name: str, tmp_path: Path) -> None:
    """Stored parts begin and end in the middle of blocks of scales."""
    plain, path, twin = (tmp_path / each for each in ("plain", "quantized", "twin"))
    case = CASES["Qwen 3.5"]
    make_checkpoint(case, plain)
    write_quantized(plain, path, LAYOUTS[name], twin=twin)
    ids = random_ids(40, seed=1)
    wanted = Oracle(twin, case).logits(ids)
    for logits in (
        PagedRun(load(path), torch.float32, "torch").step({"a": ids})["a"],
        *sharded_logits(path, 2, [ids]),
    ):
        torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=0)


def test_the_engine_generates_what_transformers_does(tmp_path: Path) -> None:
    plain, path, twin = (tmp_path / each for each in ("plain", "quantized", "twin"))
    case = CASES["Qwen 2"]
    write_quantized(make_checkpoint(case, plain), path, GPTQ, twin=twin)
    oracle, prompts = Oracle(twin, case), prompts_of(case)
    run = run_engine(path, prompts)
    assert [len(answer) for answer in run.answers] == [NEW] * len(prompts)
    pairs = zip(prompts, run.answers, strict=True)
    assert run.answers == [oracle.greedy(*pair) for pair in pairs]
    assert run.preemptions > 0


@pytest.mark.parametrize(
    "modules",
    [
        r".*\.layers\.[12]\..*_proj",
        r".*\.(q_proj|k_proj|up_proj|down_proj)",
        rf"{quantized.LINEAR}|lm_head",
    ],
)
def test_modules_that_are_plain_and_heads_that_are_not(modules: str, tmp_path: Path) -> None:
    plain = make_llama(tmp_path / "plain", intermediate_size=192, tie_word_embeddings=False)
    path, twin = tmp_path / "quantized", tmp_path / "twin"
    write_quantized(plain, path, GPTQ, modules=modules, twin=twin)
    ids = random_ids(40, seed=1)
    wanted = expected(twin, ids)
    got = PagedRun(load(path), torch.float32, "torch").step({"a": ids})["a"]
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)
    for logits in sharded_logits(path, 2, [ids]):
        torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("quantize", "layout"),
    [
        ("int8", quantized.int_quantized()),
        ("eetq", quantized.int_quantized()),
        ("bitsandbytes", quantized.int_quantized()),
        ("bitsandbytes-nf4", quantized.bitsandbytes_4bit("nf4")),
        ("bitsandbytes-fp4", quantized.bitsandbytes_4bit("fp4")),
        ("fp8", quantized.fp8("channel")),
    ],
)
def test_on_the_fly(quantize: str, layout: Layout, llama: Path, tmp_path: Path) -> None:
    write_quantized(llama, tmp_path / "quantized", layout, twin=tmp_path / "twin")
    ids = random_ids(40, seed=1)
    model = load_model(read_config(llama), torch.float32, CPU, quantize=quantize)
    got = PagedRun(model, torch.float32, "torch").step({"a": ids})["a"]
    torch.testing.assert_close(got, expected(tmp_path / "twin", ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("backend", ["torch", None])
@pytest.mark.parametrize("family", ["Llama 3", "Mixtral"])
@pytest.mark.parametrize(
    "name", ["gptq 4 bits, groups of 32", "gptq, activation order", "int-quantized"]
)
def test_kernels_are_as_near_as_dense_weights(
    name: str, family: str, backend: str | None, tmp_path: Path
) -> None:
    """To float32: the error is that of activations in bfloat16, and hardly more than of them."""
    plain, path, twin = (tmp_path / each for each in ("plain", "quantized", "twin"))
    write_quantized(make_checkpoint(CASES[family], plain), path, LAYOUTS[name], twin=twin)
    ids = random_ids(60, seed=1)
    wanted = expected(twin, ids)

    def error(folder: Path) -> tuple[float, int]:
        model = load(folder, torch.bfloat16, input_bits=16)
        pieces = (ids[:30], ids[30:59], ids[59:])
        run = PagedRun(model, torch.bfloat16, backend)
        got = torch.cat([run.step({"a": piece})["a"] for piece in pieces])
        # The median: of a few tokens rounding chooses other experts.
        return float((got - wanted).abs().median()), model.weight_bytes

    (coded, small), (dense, large) = error(path), error(twin)
    assert coded < 1.25 * dense
    assert small < 0.75 * large


def test_adapters_on_quantized_weights(llama: Path, tmp_path: Path) -> None:
    path, twin = tmp_path / "quantized", tmp_path / "twin"
    write_quantized(llama, path, GPTQ, twin=twin)
    models = Models(twin, [make_adapter(llama, tmp_path / "one")], tmp_path / "merged")
    ids = random_ids(40, seed=1)

    def work(shard: Shard) -> list[Tensor]:
        table = LoraTable(2, 8, 64)
        model = load_model(read_config(path), torch.float32, CPU, shard=shard, lora=table)
        table.allocate(torch.float32, CPU)
        table.put(1, read_adapter(models.adapters[0], lora_targets(model), table, pin=False))
        table.plan([-1, 1], torch.tensor([-1] * 39 + [1] * 40, dtype=torch.int32))
        run = PagedRun(model, torch.float32, "torch")
        return list(run.step({"base": ids[1:], "adapted": ids}).values())

    for base, adapted in (work(ALONE), *on_shards(2, work)):
        torch.testing.assert_close(base, models.logits(0, ids[1:]), atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(adapted, models.logits(1, ids), atol=TOLERANCE, rtol=0)


def test_tensors_of_a_quantized_checkpoint_that_are_missing_are_named(
    llama: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    from tgi_cli.errors import CheckpointError

    write_quantized(llama, tmp_path, quantized.gptq(4, 32))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.scales"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


def test_older_checkpoints_have_a_quantization_config_file(llama: Path, tmp_path: Path) -> None:
    layout = quantized.gptq(4, 32)
    write_quantized(llama, tmp_path, layout)
    config = json.loads((tmp_path / "config.json").read_text())
    stated = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    del stated["quant_method"]
    (tmp_path / "quantize_config.json").write_text(json.dumps(stated))
    assert model_facts(read_config(tmp_path)).quantization == "gptq"
    ids = random_ids(10, seed=1)
    PagedRun(load(tmp_path), torch.float32, "torch").step({"a": ids})


@pytest.mark.parametrize("name", ["fp8 by block", "pack-quantized with zeros", "awq"])
def test_formats_of_deepseek(name: str, tmp_path: Path) -> None:
    plain, path, twin = (tmp_path / each for each in ("plain", "quantized", "twin"))
    make_checkpoint(DEEPSEEK, plain)
    write_quantized(plain, path, LAYOUTS[name], twin=twin)
    stored = json.loads((path / "config.json").read_text())["quantization_config"]
    assert name != "fp8 by block" or stored["weight_block_size"] == [128, 128]
    ids = random_ids(40, seed=1)
    wanted = Oracle(twin, DEEPSEEK).logits(ids)
    got = PagedRun(load(path), torch.float32, "torch").step({"a": ids})["a"]
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)
    assert (wanted - Oracle(plain, DEEPSEEK).logits(ids)).abs().max() > 10 * TOLERANCE


def _transposed(layout: Layout) -> Layout:
    """For checkpoints whose plain weights are [in, out]."""

    def write(module: str, tensor: Tensor) -> quantized.Written:
        tensors, stands_for = layout.write(module, tensor.T.contiguous())
        return tensors, stands_for.T.contiguous()

    return replace(layout, write=write)
