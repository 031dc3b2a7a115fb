"""GGUF files against transformers' model of what their blocks stand for."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parity.cases import CASES
from tests.parity.engine_run import NEW, run_engine
from tests.parity.families import Oracle, make_checkpoint, prompts_of
from tests.parity.test_lora import Models
from tests.tools.checkpoints import make_llama
from tests.tools.gguf_files import Kinds, write_gguf
from tests.tools.lora_adapters import make_adapter
from tests.tools.paged_run import PagedRun, expected, load, random_ids
from tests.tools.thread_shards import sharded_logits
from tgi_cli import demo
from tgi_cli.config import ServeConfig
from tgi_cli.gguf.model_config import model_config
from tgi_cli.gguf.reader import read_gguf
from tgi_cli.kernels import without_cpp_kernels
from tgi_cli.kernels.linear import multiplies_bytes
from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.layers.lora import LoraTable
from tgi_cli.models import load_model, model_facts, read_config
from tgi_cli.models.lora import lora_targets, read_adapter
from tgi_cli.process.progress import ProgressReporter
from tgi_cli.quantize.gguf_output import quantize_to_gguf
from tgi_cli.quantize.options import QuantizeOptions
from tgi_cli.worker.factory import load_worker, resolve_config

TOLERANCE = 1e-4
"""Of logits in float32, whose standard deviation is about 1."""

TYPES = (
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    "TQ1_0",
    "TQ2_0",
)

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4, "head_dim": 32}
"""Of rows of whole blocks of 256."""

FAMILIES = (
    "Llama 3",
    "Qwen 2",
    "Qwen 3",
    "Gemma",
    "Gemma 2",
    "Gemma 3",
    "Phi-3",
    "Phi-4",
    "Granite",
    "Granite 4",
    "Granite 4, dense and rotated",
    "Bamba",
    "Llama 4",
    "Llama 4, dense layers between",
    "OLMo 2",
    "OLMo 3",
    "SmolLM 3",
    "Seed-OSS",
    "GPT-2",
    "GPT-BigCode",
    "GPT-NeoX",
    "GPT-NeoX, sequential",
    "Falcon, multi-query",
    "Falcon, grouped",
    "StarCoder 2",
    "Mixtral",
    "Qwen 2 MoE",
    "Qwen 3 MoE, windows",
    "Qwen 3.5",
    "Qwen 3.5 MoE",
    "Qwen3-Next",
    "gpt-oss",
    "LFM 2",
    "LFM 2 MoE",
    "DeepSeek V2",
    "DeepSeek V2 Lite",
    "DeepSeek V3",
    "DeepSeek V3.2",
    "Kimi K2",
    "Kimi Linear",
    "GLM-4.7-Flash",
    "Youtu-LLM",
    "Gemma 3n",
    "Gemma 4",
    "Gemma 4, dense",
    "Gemma 4 with experts",
    "Nemotron-H",
    "Nemotron 3",
    "Nemotron 3, latent experts",
)

_WITHOUT = {
    "DeepSeek V2 Lite": {"attention_bias": False, "n_group": 1, "topk_group": 1},
    "Gemma 2": {"query_pre_attn_scalar": 16},
    "Gemma 3": {"query_pre_attn_scalar": 16},
    "Granite 4, dense and rotated": {"time_step_limit": (0.0, float("inf"))},
    "Llama 4": {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
    "Llama 4, dense layers between": {
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "use_qk_norm": True,
    },
    "Mixtral": {"sliding_window": None},
    "Nemotron 3": {"time_step_min": 0.001},
    "Qwen 3 MoE, windows": {"sliding_window": None, "norm_topk_prob": True},
}
"""Options that files cannot express, off or as files imply them."""


WRITTEN = (
    *("Gemma", "Gemma 2", "Gemma 3", "Granite", "OLMo 2", "Phi-3", "Phi-4", "Seed-OSS"),
    *("SmolLM 3", "Mixtral", "Qwen 2 MoE", "Qwen 3 MoE, windows"),
)
"""Families that ``tgi quantize --format gguf`` writes, beside Llama, Mistral and Qwen."""


def mixed(name: str) -> str:
    """Types as in files of the kind Q4_K_M."""
    if "attn_v" in name or "ffn_down" in name or name == "output.weight":
        return "Q6_K"
    return "Q5_0" if "ffn_up" in name else "Q4_K"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With rows of whole blocks of 256."""
    path = tmp_path_factory.mktemp("llama")
    return make_llama(path, **WIDE)


@pytest.mark.parametrize("kind", TYPES)
def test_types(kind: str, llama: Path, tmp_path: Path) -> None:
    path, twin = tmp_path / "gguf", tmp_path / "twin"
    write_gguf(llama, path, kind, twin)
    ids = random_ids(40, seed=1)
    wanted = expected(twin, ids)
    got = PagedRun(load(path), torch.float32, "torch").step({"a": ids})["a"]
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)
    assert wanted.std() > 0.1, "the tolerance is to mean something"


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    plain, path, twin = (tmp_path / each for each in ("plain", "gguf", "twin"))
    case = CASES[name]
    # What is left out: the base of angles, and a bound of steps.
    stored = {} if name in ("Mixtral", "Nemotron 3") else case.stored
    case = replace(case, values={**case.values, **_WITHOUT.get(name, {})}, stored=stored)
    make_checkpoint(case, plain)
    write_gguf(plain, path, "Q8_0", twin)
    config = read_config(path)
    assert model_facts(config).quantization == "gguf"
    ids = random_ids(100, seed=1)
    wanted = Oracle(twin, case).logits(ids)
    got = PagedRun(load(path), torch.float32, "torch").step({"a": ids})["a"]
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)
    for logits in sharded_logits(path, 2, [ids]):
        torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("arch", "name"), [("qwen2vl", "Qwen 2"), ("qwen3vl", "Qwen 3")])
def test_decoders_of_models_that_see(arch: str, name: str, tmp_path: Path) -> None:
    plain, path, twin = (tmp_path / each for each in ("plain", "gguf", "twin"))
    write_gguf(make_checkpoint(CASES[name], plain), path, "Q8_0", twin, arch=arch)
    ids = random_ids(100, seed=1)
    got = PagedRun(load(path), torch.float32, "torch").step({"a": ids})["a"]
    torch.testing.assert_close(got, Oracle(twin, CASES[name]).logits(ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", WRITTEN)
def test_written_files_are_read_as_the_checkpoint_was(name: str, tmp_path: Path) -> None:
    plain, path = tmp_path / "plain", tmp_path / "gguf"
    case, bundled = CASES[name], demo.model_path()
    case = replace(case, stored={} if name == "Mixtral" else case.stored)
    vocab_size = json.loads((bundled / "config.json").read_text())["vocab_size"]
    values = {**case.values, **_WITHOUT.get(name, {}), "vocab_size": vocab_size}
    make_checkpoint(replace(case, values=values), plain)
    for each in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled / each, plain / each)
    file = path / "model.gguf"
    options = QuantizeOptions(model_id="x", output_dir=file, format="gguf", exclude=("*",))
    quantize_to_gguf(plain, options, ProgressReporter(show_bar=False, log_interval=None))
    (path / "config.json").write_text(json.dumps(model_config(read_gguf(file))))
    ids = random_ids(100, seed=1)
    wanted, got = (
        PagedRun(load(each), torch.float32, "torch").step({"a": ids})["a"] for each in (plain, path)
    )
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)


def mixed_integers(name: str) -> str:
    """All codes of 4, 5, 6 and 8 bits, in groups of 16 and 32, with minima and without."""
    kinds = {"attn_q": "Q4_0", "attn_k": "Q5_1", "attn_v": "Q6_K", "attn_output": "Q8_0"}
    kinds |= {"ffn_gate": "Q4_K", "ffn_up": "Q5_K", "ffn_down": "Q3_K", "output.": "Q2_K"}
    return next((kind for part, kind in kinds.items() if part in name), "Q8_0")


@pytest.mark.parametrize("kinds", ["Q4_0", "Q8_0", "Q4_K", "Q6_K", mixed_integers])
def test_rounded_activations_depend_on_no_other_token(
    kinds: str | Kinds, llama: Path, tmp_path: Path
) -> None:
    """Neither of other sequences nor of chunks; and they cost little."""
    if not multiplies_bytes():
        pytest.skip("this processor does not multiply bytes")
    path, twin = tmp_path / "gguf", tmp_path / "twin"
    write_gguf(llama, path, kinds, twin)
    ids, others = random_ids(60, seed=1), random_ids(45, seed=2)

    def logits(input_bits: int, cuts: tuple[int, ...], eager: bool = False) -> Tensor:
        run = PagedRun(load(path, torch.bfloat16, input_bits), torch.bfloat16, None, eager=eager)
        assert (run.program is None) == eager
        pieces = [ids[begin:end] for begin, end in pairwise([0, *cuts, len(ids)])]
        return torch.cat([run.step({"a": piece, "b": others[:7]})["a"] for piece in pieces])

    rounded = logits(8, (30, 59))
    assert torch.equal(rounded, logits(8, (1, 2, 10, 22)))
    assert torch.equal(rounded, logits(8, (), eager=True))
    wanted = expected(twin, ids)
    error = (rounded - wanted).norm()
    least = (logits(16, ()) - wanted).norm()
    assert least < error < 8 * least


@pytest.mark.parametrize("kind", ["Q4_K", "F16"])
def test_activations_are_rounded_by_default_where_there_are_kernels(
    kind: str, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_gguf(llama, tmp_path / "gguf", kind)
    rounds = kind == "Q4_K" and multiplies_bytes()
    serve = ServeConfig(model_id="x", dtype="bfloat16", max_batch_total_tokens=64)
    identities = set()
    for asked in (None, False, True):
        if asked and not rounds:
            continue
        caplog.clear()
        with caplog.at_level("INFO", logger="tgi_cli"):
            worker, config = load_worker(replace(serve, quantize_activations=asked), path)
        assert config.quantize_activations == (rounds and asked is not False)
        assert (", activations of 8 bits" in caplog.text) == config.quantize_activations
        assert ("activations are rounded" in caplog.text) == config.quantize_activations
        identities.add(worker.block_identity())
        worker.close()
    assert len(identities) == 1 + rounds
    assert not resolve_config(replace(serve, dtype="float32"), path)[0].quantize_activations
    with without_cpp_kernels():
        assert not resolve_config(serve, path)[0].quantize_activations


def test_the_engine_generates_what_transformers_does(tmp_path: Path) -> None:
    plain, path, twin = (tmp_path / each for each in ("plain", "gguf", "twin"))
    case = CASES["Qwen 2"]
    write_gguf(make_checkpoint(case, plain), path, "Q5_1", twin)
    oracle, prompts = Oracle(twin, case), prompts_of(case)
    run = run_engine(path, prompts)
    assert [len(answer) for answer in run.answers] == [NEW] * len(prompts)
    pairs = zip(prompts, run.answers, strict=True)
    assert run.answers == [oracle.greedy(*pair) for pair in pairs]


def test_adapters(llama: Path, tmp_path: Path) -> None:
    """Added to the products, whose rows are in the order of the family."""
    path, twin = tmp_path / "gguf", tmp_path / "twin"
    write_gguf(llama, path, "Q6_K", twin)
    models = Models(twin, [make_adapter(llama, tmp_path / "one")], tmp_path / "merged")
    ids = random_ids(40, seed=1)
    table, cpu = LoraTable(2, 8, 64), torch.device("cpu")
    model = load_model(read_config(path), torch.float32, cpu, lora=table)
    table.allocate(torch.float32, cpu)
    table.put(1, read_adapter(models.adapters[0], lora_targets(model), table, pin=False))
    table.plan([-1, 1], torch.tensor([-1] * 39 + [1] * 40, dtype=torch.int32))
    run = PagedRun(model, torch.float32, "torch")
    base, adapted = run.step({"base": ids[1:], "adapted": ids}).values()
    torch.testing.assert_close(base, models.logits(0, ids[1:]), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(adapted, models.logits(1, ids), atol=TOLERANCE, rtol=0)


def test_weights_in_float16_are_announced(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "gguf"
    write_gguf(llama, path, lambda name: "F16" if "attn_q" in name else "Q8_0")
    load(path)
    assert "weights in float16" not in caplog.text
    with caplog.at_level("INFO", logger="tgi_cli"):
        load(path, torch.bfloat16)
    assert "3 weights in float16 are rounded to bfloat16" in caplog.text


@pytest.mark.parametrize("tied", [True, False])
def test_layers_of_several_types_are_one_program(tied: bool, tmp_path: Path) -> None:
    """In bfloat16, with products of codes; the embedding stays coded, tied or not."""
    plain = make_llama(tmp_path / "plain", **WIDE, tie_word_embeddings=tied)
    path, twin = tmp_path / "gguf", tmp_path / "twin"
    write_gguf(plain, path, mixed, twin)
    ids = random_ids(40, seed=1)
    wanted = expected(twin, ids)
    model = load(path, torch.bfloat16)
    run = PagedRun(model, torch.bfloat16, None)
    assert run.program is not None
    got = run.step({"a": ids})["a"]
    dense = PagedRun(load(twin, torch.bfloat16), torch.bfloat16, None).step({"a": ids})["a"]
    assert (got - wanted).norm() < 1.2 * (dense - wanted).norm()
    table = model.model.embed_tokens
    assert table.weight is None
    assert table.mapped is None
    assert isinstance(table.head, PackedMatrix)
    assert table.head.bits == 4
    assert (table.head is model.lm_head.packed) == tied
    stored = load(twin).model.embed_tokens(torch.arange(256))
    assert torch.equal(table(torch.arange(256)), stored.bfloat16())
