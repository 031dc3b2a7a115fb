"""Models of many families are quantized; what is written is loaded by our engine, and computes
what transformers computes with the weights that it stands for.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.parity import test_fallback
from tests.parity.cases import CASES, Case
from tests.parity.families import Oracle, random_ids
from tests.tools.checkpoints import make_llama
from tests.tools.miniatures import make_miniature, make_twin
from tests.tools.paged_run import CPU, PagedRun, load
from tgi_cli import demo
from tgi_cli.errors import ConfigError, UnsupportedModelError
from tgi_cli.models import model_facts, read_config
from tgi_cli.quantization.algorithms.recipe import Recipe
from tgi_cli.quantize.block_runner import BlockRunner
from tgi_cli.quantize.calibration import heldout_windows
from tgi_cli.quantize.checkpoint_writer import SHARD_BYTES
from tgi_cli.quantize.evaluation import evaluate
from tgi_cli.quantize.gptq import MIN_EXPERT_TOKENS
from tgi_cli.quantize.offloaded_model import OffloadedModel
from tgi_cli.quantize.options import QuantizeOptions
from tgi_cli.quantize.pipeline import QuantizeJob, QuantizeResult, quantize

TOLERANCE = 1e-4
"""Of logits in float32, whose standard deviation is about 1."""

EVERY = CASES | test_fallback.CASES

FAMILIES = (
    "Llama 3",
    "Qwen 3",
    "Gemma 2",
    "Gemma 3",
    "Gemma 3 with images",
    "Phi-3",
    "GPT-2",
    "GPT-BigCode",
    "GPT-NeoX",
    "Falcon, grouped",
    "OLMo 2",
    "Mixtral",
    "Qwen 2 MoE",
    "Qwen 3 MoE",
    "Cohere",
    "OPT",
    "GLM 4.5 MoE",
    "LFM 2",
    "Granite 4",
    "Nemotron-H",
)
"""Norms before and after, merged and transposed and interleaved weights, layers that return
tuples, two kinds of rotation, experts alone, with a shared one and beside dense layers, models of
transformers' with our layers, convolutions, and states."""

GPTQ = Recipe(method="gptq", group_size=16)
AWQ = Recipe(method="awq", group_size=16, sym=False, format="awq", group_aware=False)
RTN = Recipe(method="rtn", group_size=16, group_aware=False)


def job(
    model: Path, out: Path, recipe: Recipe, shard_bytes: int = SHARD_BYTES, **changes: object
) -> QuantizeJob:
    values = {"calibration": "bundled", "samples": 12, "seq_len": 64, "device": "cpu"} | changes
    options = QuantizeOptions(model_id=str(model), **values)  # type: ignore[arg-type]
    return QuantizeJob(model, out, recipe, options, "tgi quantize x y", shard_bytes)


def check_served(case: Case, plain: Path, quantized: Path, twin: Path) -> None:
    """Our logits of what was written are transformers' of what it stands for."""
    ids = random_ids(40, seed=1)
    wanted = Oracle(make_twin(plain, quantized, twin), case).logits(ids)
    got = PagedRun(load(quantized), torch.float32, "torch").step({"a": ids})["a"]
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)
    assert (wanted - Oracle(plain, case).logits(ids)).abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_gptq(name: str, tmp_path: Path) -> None:
    case = EVERY[name]
    plain = make_miniature(case, tmp_path / "plain")
    outcome = quantize(job(plain, tmp_path / "out", GPTQ))
    assert model_facts(read_config(outcome.path)).quantization == "gptq"
    check_served(case, plain, outcome.path, tmp_path / "twin")
    assert all(0 < layer.loss < 0.1 for layer in outcome.layers), "of 4 bits"
    rounded = quantize(job(plain, tmp_path / "rounded", RTN))
    assert [layer.name for layer in rounded.layers] == sorted(
        (layer.name for layer in outcome.layers), key=[x.name for x in rounded.layers].index
    )
    ids = heldout_windows(plain, 64)[:8]
    better, worse = (evaluate(plain, path, ids, CPU).kl for path in (outcome.path, rounded.path))
    assert better < 0.9 * worse


@pytest.mark.parametrize("name", FAMILIES)
def test_block_after_block_is_the_whole_model(name: str, tmp_path: Path) -> None:
    case = EVERY[name]
    plain = make_miniature(case, tmp_path / "plain")
    texts = [random_ids(50, seed) for seed in range(3)]
    with torch.no_grad():
        model = OffloadedModel(plain, CPU)
        stream = BlockRunner(model, torch.tensor(texts))
        hidden = stream.begin(tmp_path / "inputs")
        assert hidden is not None
        rows = hidden.read(0, 3)
        for block, path in enumerate(model.block_paths):
            model.materialize(path)
            rows = stream.run(block, 0, rows)
            model.release(path)
        assert all(each.is_meta for each in model.blocks.parameters())
        model.materialize_rest(head=True)
        got = stream.logits(0, rows)
    oracle = Oracle(plain, case)
    for text, logits in zip(texts, got, strict=True):
        torch.testing.assert_close(logits, oracle.logits(text), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "name",
    [
        *("Llama 3", "Qwen 3", "Gemma 2", "Phi-3", "GPT-2", "Cohere", "Qwen 2 MoE", "Mixtral"),
        *("LFM 2", "Nemotron-H"),
    ],
)
def test_awq(name: str, tmp_path: Path) -> None:
    case = EVERY[name]
    plain = make_miniature(case, tmp_path / "plain")
    outcome = quantize(job(plain, tmp_path / "out", AWQ))
    assert model_facts(read_config(outcome.path)).quantization == "awq"
    check_served(case, plain, outcome.path, tmp_path / "twin")
    norms = [name for name in OffloadedModel(plain, CPU).stored if "norm" in name or "ln_" in name]
    before, after = OffloadedModel(plain, CPU), OffloadedModel(outcome.path, CPU)
    assert any(not torch.equal(before.tensor(norm), after.tensor(norm)) for norm in norms)


def test_awq_reports_layers_without_a_layer_to_scale(tmp_path: Path) -> None:
    plain = make_miniature(CASES["OLMo 2"], tmp_path / "plain")
    with pytest.raises(UnsupportedModelError, match=r"nothing to fold scales into before .*q_proj"):
        quantize(job(plain, tmp_path / "out", AWQ))
    assert not (tmp_path / "out").exists()


BYTES = {"group_size": -1, "bits": 8, "format": "compressed-tensors", "group_aware": False}


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        (replace(GPTQ, bits=2, sym=False, format="gptq_v2"), "Qwen 3"),
        (replace(GPTQ, bits=3, mse=True), "Llama 3"),
        (replace(GPTQ, bits=8, desc_act=True, group_aware=False), "Mixtral"),
        (replace(GPTQ, desc_act=True, static_groups=True, group_aware=False), "Phi-3"),
        (replace(GPTQ, format="compressed-tensors", group_size=-1), "GPT-2"),
        (replace(AWQ, format="compressed-tensors"), "Qwen 3"),
        (RTN, "Qwen 3 MoE"),
        (Recipe(method="fp8", **BYTES), "Mixtral"),  # type: ignore[arg-type]
        (Recipe(method="int8", **BYTES), "GPT-2"),  # type: ignore[arg-type]
    ],
)
def test_recipes(recipe: Recipe, name: str, tmp_path: Path) -> None:
    case = CASES[name]
    plain = make_miniature(case, tmp_path / "plain")
    outcome = quantize(job(plain, tmp_path / "out", recipe))
    check_served(case, plain, outcome.path, tmp_path / "twin")


def test_experts_that_few_tokens_reach_are_calibrated_all_the_same(tmp_path: Path) -> None:
    plain = make_miniature(CASES["Qwen 3 MoE"], tmp_path / "plain")
    outcome = quantize(job(plain, tmp_path / "out", GPTQ, samples=1, seq_len=128))
    few = [layer for layer in outcome.layers if layer.note]
    assert few
    assert all(".experts." in layer.name for layer in few)
    assert all("calibrated with all of a batch" in layer.note for layer in few)
    assert all(int(layer.note.split()[0]) < MIN_EXPERT_TOKENS for layer in few)


def test_what_is_written(tmp_path: Path) -> None:
    plain = make_miniature(CASES["Mixtral"], tmp_path / "plain")
    (plain / "README.md").write_text("---\nlicense: apache-2.0\ndatasets: [x]\n---\nwords\n")
    (plain / "LICENSE").write_text("terms")
    outcome = quantize(
        job(plain, tmp_path / "out", GPTQ, 40_000, evaluate=True, exclude=("*.layers.1.*",))
    )
    files = {file.name for file in outcome.path.iterdir()}
    assert files >= {
        *("config.json", "generation_config.json", "quantize_config.json", "README.md"),
        *("tokenizer.json", "tokenizer_config.json", "LICENSE", "model.safetensors.index.json"),
    }
    shards = sorted(outcome.path.glob("*.safetensors"))
    assert len(shards) > 3
    assert all(file.stat().st_size < 80_000 for file in shards)
    stated = json.loads((outcome.path / "config.json").read_text())["quantization_config"]
    assert stated["bits"] == 4
    assert "lm_head" in outcome.ignored
    gates = [name for name in outcome.ignored if name.endswith(".gate")]
    assert len(gates) == 3, "routers are never quantized"
    assert any(".layers.1." in name for name in outcome.ignored)
    assert not any(".layers.1." in layer.name for layer in outcome.layers)
    card = (outcome.path / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "datasets" not in card
    assert "tgi quantize x y" in card
    assert outcome.evaluation is not None
    assert f"{outcome.evaluation.kl:.2e}" in card
    assert not (tmp_path / "out.partial").exists()
    before, after = OffloadedModel(plain, CPU), OffloadedModel(outcome.path, CPU)
    assert before.stored.keys() == after.stored.keys()
    for name, entry in after.stored.items():
        if entry.read is None:
            assert torch.equal(before.tensor(name), after.tensor(name)), name


@pytest.fixture(scope="module")
def demo_outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, QuantizeResult]:
    folder = tmp_path_factory.mktemp("demo")
    recipes = {
        "gptq": Recipe(method="gptq", bits=4, group_size=128),
        "awq": Recipe(
            method="awq", bits=4, group_size=128, sym=False, format="awq", group_aware=False
        ),
        "rtn": Recipe(method="rtn", bits=4, group_size=128, group_aware=False),
    }
    return {
        name: quantize(
            job(demo.model_path(), folder / name, recipe, samples=48, seq_len=256, evaluate=True)
        )
        for name, recipe in recipes.items()
    }


def test_calibration_pays_on_the_bundled_model(demo_outcomes: dict[str, QuantizeResult]) -> None:
    kl = {name: outcome.evaluation.kl for name, outcome in demo_outcomes.items()}  # type: ignore[union-attr]
    assert kl["gptq"] < 0.6 * kl["rtn"]
    assert kl["awq"] < 0.9 * kl["rtn"]
    for outcome in demo_outcomes.values():
        assert outcome.evaluation is not None
        assert outcome.evaluation.perplexity < 1.2 * outcome.evaluation.original_perplexity
        assert outcome.evaluation.num_bytes < 0.5 * outcome.evaluation.original_bytes
        assert outcome.evaluation.top1 > 0.8


def test_an_evaluation_equals_the_models_perplexities(
    demo_outcomes: dict[str, QuantizeResult],
) -> None:
    """Against transformers' model, with no streaming at all."""
    from transformers import LlamaForCausalLM

    plain = demo.model_path()
    model = LlamaForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    quantized = OffloadedModel(demo_outcomes["gptq"].path, CPU)
    ids = torch.tensor([[(17 * i + 5 * row * i) % 4096 for i in range(32)] for row in range(4)])
    with torch.no_grad():
        p = model(ids).logits.double().log_softmax(-1)
        for name in [name for name in quantized.stored if name in dict(model.named_parameters())]:
            model.get_parameter(name).copy_(quantized.tensor(name))
        q = model(ids).logits.double().log_softmax(-1)
    found = evaluate(plain, demo_outcomes["gptq"].path, ids, CPU)
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    nexts = q[:, :-1].gather(2, ids[:, 1:, None])
    assert found.perplexity == pytest.approx(float((-nexts.mean()).exp()), rel=1e-4)
    assert found.top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))


def test_a_quantized_model_is_not_quantized_again(
    demo_outcomes: dict[str, QuantizeResult], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="already quantized with awq"):
        quantize(job(demo_outcomes["awq"].path, tmp_path / "again", GPTQ))


def test_the_device_and_dtype_of_the_checkpoint_do_not_matter(tmp_path: Path) -> None:
    """A checkpoint in bfloat16 is computed in float32; its plain tensors stay what they are."""
    plain = make_llama(tmp_path / "plain", dtype=torch.bfloat16, shape="tiny")
    outcome = quantize(job(plain, tmp_path / "out", RTN))
    stored = OffloadedModel(outcome.path, CPU).stored
    assert stored["model.norm.weight"].dtype == "BF16"
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == "quantized"
