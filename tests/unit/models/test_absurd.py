"""Absurd files of a checkpoint end as an error with a cause, before they have cost anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.parity.cases import CASES, SMALL, Case
from tests.parity.families import make_checkpoint
from tests.tools.checkpoints import make_llama
from tgi_cli.config import ServeConfig
from tgi_cli.errors import CheckpointError, ModelError, OutOfMemoryError, TgiError
from tgi_cli.models import load_model, model_facts, read_config
from tgi_cli.models.size_check import Outline, check_sizes, read_outline
from tgi_cli.quantization.detect import detect_format
from tgi_cli.worker.factory import load_worker

FAMILIES = {
    "llama": CASES["Llama 3"],
    "gemma3": CASES["Gemma 3"],
    "mixtral": CASES["Mixtral"],
    "phi4": CASES["Phi-4"],
    "stablelm": Case("StableLmConfig", SMALL),
}
"""The last through transformers."""

EVERY = 43
"""Every how many of the invalid values is tried here. ``tests.tools.invalid_configs 1`` tries each:
0.1 s of a core for one, five minutes in all."""


def write(folder: Path, name: str = "config.json", **values: Any) -> Path:
    file = folder / name
    raw = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(raw | values))
    return folder


def test_each_field_may_have_any_value(tmp_path: Path) -> None:
    for name, case in FAMILIES.items():
        make_checkpoint(case, tmp_path / name)
        (tmp_path / name / "generation_config.json").unlink(missing_ok=True)
    folders = [str(tmp_path / name) for name in FAMILIES]
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.invalid_configs", str(EVERY), *folders],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    tried = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["folder"] for one in tried} == FAMILIES.keys()
    assert len(tried) > 50
    assert [one for one in tried if one["error"] and not one["told"]] == []
    assert not [one for one in tried if len(one["error"]) > 1000 or "\n" in one["error"]]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("vocab_size", 2**40),
        ("vocab_size", 257),
        ("hidden_size", 10**12),
        ("head_dim", 2**62),
        ("intermediate_size", 10**400),
    ],
    ids=lambda value: str(value)[:20],
)
def test_sizes_that_the_headers_contradict(key: str, value: int, tmp_path: Path) -> None:
    make_llama(tmp_path)
    write(tmp_path, **{key: value})
    with pytest.raises(ModelError, match=key) as caught:
        model_facts(read_config(tmp_path))
    assert caught.value.exit_code == 4
    assert len(caught.value.cause) < 500


def test_experts_that_the_headers_contradict(tmp_path: Path) -> None:
    make_checkpoint(CASES["Mixtral"], tmp_path)
    for value in (10**9, 60_000):
        write(tmp_path, num_local_experts=value)
        with pytest.raises(ModelError, match="experts"):
            model_facts(read_config(tmp_path))


@pytest.mark.parametrize(
    ("name", "key", "value", "why"),
    [
        ("Mixtral", "num_experts_per_tok", 2**31 - 1, r"2147483647 of \d+ experts"),
        ("Mixtral", "rms_norm_eps", -1.0, r"epsilon of a norm is -1\.0"),
        ("Gemma 3n", "altup_num_inputs", 2**31 - 1, "stream 1 of 2147483647"),
        ("Gemma 3n", "altup_active_idx", 4, "stream 4 of 3"),
    ],
)
def test_values_that_no_tensor_bounds(
    name: str, key: str, value: float, why: str, tmp_path: Path
) -> None:
    make_checkpoint(CASES[name], tmp_path)
    model_facts(read_config(tmp_path))
    write(tmp_path, **{key: value})
    with pytest.raises(ModelError, match=why):
        model_facts(read_config(tmp_path))


def test_layers_and_vocabulary_of_a_transformers_model_are_bounded(tmp_path: Path) -> None:
    make_checkpoint(FAMILIES["stablelm"], tmp_path)
    for key in ("num_hidden_layers", "vocab_size"):
        raw = (tmp_path / "config.json").read_text()
        write(tmp_path, **{key: 10**9})
        with pytest.raises(ModelError, match=key):
            model_facts(read_config(tmp_path))
        (tmp_path / "config.json").write_text(raw)


def test_random_weights_must_fit_the_memory(tmp_path: Path) -> None:
    make_llama(tmp_path, num_hidden_layers=3)
    (tmp_path / "model.safetensors").unlink()

    def load(**values: Any) -> Any:
        config = read_config(write(tmp_path, **values))
        return load_model(config, torch.float32, torch.device("cpu"), load_format="dummy")

    load()
    with pytest.raises(OutOfMemoryError, match="parameters"):
        load(hidden_size=1 << 20, intermediate_size=1 << 20)
    with pytest.raises(ModelError, match="more than any model"):
        load(num_hidden_layers=10**9)


def test_no_model_of_transformers_exceeds_the_size_limits() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    checked = 0
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            raw = transformers.CONFIG_MAPPING[kind]().to_dict()
        except Exception:  # some have no defaults
            continue
        raw = json.loads(json.dumps(raw, default=str, skipkeys=True))
        check_sizes(Path("/none"), raw, quantized=False)
        checked += 1
    assert checked > 100


def test_headers_are_summarized(tmp_path: Path) -> None:
    assert read_outline(tmp_path) is None
    make_llama(tmp_path)
    assert read_outline(tmp_path) == Outline(tensors=2 + 9 * 3, largest=256, stacked=0)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_outline(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("kind", ["nested", "large", "array", "number"])
def test_json_beyond_its_bounds(name: str, kind: str, tmp_path: Path) -> None:
    make_llama(tmp_path)
    file = tmp_path / name
    if kind == "large":
        with file.open("wb") as opened:
            opened.truncate(1 << 40)
    else:
        texts = {"nested": "[" * 200_000, "array": "[1]", "number": '{"x": ' + "1" * 9999 + "}"}
        file.write_text(texts[kind])
    with pytest.raises(ModelError, match=name):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("stated", "wanted"),
    [
        (10**12, ()),
        (-1, ()),
        ([2, 10**12, -5, 2], (2,)),
        ([], ()),
        (True, None),
        ("2", None),
        (2.0, None),
        ({"a": 2}, None),
        ([2, "3"], None),
        ([[2]], None),
        (list(range(10_000)), None),
    ],
)
def test_ids_that_end_a_text(stated: Any, wanted: tuple[int, ...] | None, tmp_path: Path) -> None:
    make_llama(tmp_path)
    for name in ("generation_config.json", "config.json"):
        write(tmp_path, name, eos_token_id=stated)
        config = read_config(tmp_path)
        if wanted is None:
            with pytest.raises(ModelError, match="eos_token_id"):
                model_facts(config)
        else:
            assert model_facts(config).eos_token_ids == wanted
        (tmp_path / "generation_config.json").unlink(missing_ok=True)


def test_a_context_without_end_is_served_as_far_as_tables_go(tmp_path: Path) -> None:
    make_llama(tmp_path, max_position_embeddings=10**15)
    serve = ServeConfig(
        model_id="m", max_batch_size=1, measured_limits=False, disable_grammar_support=True
    )
    worker, config = load_worker(serve, tmp_path)
    worker.close()
    assert config.max_total_tokens == 1 << 24


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "a/../b", "..", "x" * 5000, "a\0b", "sub/x"]
)
def test_an_index_names_files_beside_it_alone(name: str, tmp_path: Path) -> None:
    make_llama(tmp_path, files=2)
    index = tmp_path / "model.safetensors.index.json"
    stated = json.loads(index.read_text())
    stated["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(stated))
    with pytest.raises(CheckpointError, match="not beside it"):
        model_facts(read_config(tmp_path))


@pytest.mark.parametrize("pipe", ["model.safetensors", "x.safetensors"])
def test_pipes_instead_of_weights_are_not_read(pipe: str, tmp_path: Path) -> None:
    make_llama(tmp_path, dtype=torch.float16)
    write(tmp_path, dtype=None)  # so that all files are asked
    (tmp_path / pipe).unlink(missing_ok=True)
    os.mkfifo(tmp_path / pipe)
    if pipe == "x.safetensors":
        assert model_facts(read_config(tmp_path)).dtype == "float16"
    else:
        with pytest.raises(CheckpointError):
            model_facts(read_config(tmp_path))


@pytest.mark.parametrize(
    "stated",
    [
        {"quant_method": "gptq", "group_size": []},
        {"quant_method": "awq", "bits": 10**9},
        {"quant_method": "awq", "bits": float("inf")},
        {"quant_method": "fp8", "weight_block_size": [1]},
        {"quant_method": "fp8", "weight_block_size": 3},
        {"quant_method": "compressed-tensors", "config_groups": []},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": 3}}},
        {"quant_method": ["gptq"]},
        {},
    ],
)
def test_absurd_quantization(stated: dict[str, Any]) -> None:
    with pytest.raises(TgiError):
        detect_format(stated)


def test_a_target_that_backtracks_without_end() -> None:
    layout: Any = detect_format(
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"targets": ["re:(a|aa)+$"], "weights": {}}},
        }
    )
    layout._patterns._left = 0.2
    with pytest.raises(ValueError, match="takes too long"):
        layout._scheme("a" * 80 + "b")
