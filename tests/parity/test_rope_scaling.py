"""``--rope-scaling`` and ``--rope-factor`` against transformers with the same in config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.checkpoints import make_llama
from tests.tools.paged_run import PagedRun, expected, random_ids
from tgi_cli.config import ServeConfig
from tgi_cli.errors import ConfigError, UnsupportedModelError
from tgi_cli.models import load_model, model_facts, read_config
from tgi_cli.models.registry import decoder_spec, scale_rope

CONTEXT = 64
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SPELLINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "new": {"rope_parameters": LLAMA3},
    "old": {
        "rope_parameters": None,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "linear", "factor": 8.0},
    },
}


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
@pytest.mark.parametrize("stated", SPELLINGS)
def test_logits_are_those_of_the_same_scaling(kind: str, stated: str, tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model", max_position_embeddings=CONTEXT, **SPELLINGS[stated])
    theirs = tmp_path / "theirs"
    shutil.copytree(path, theirs)
    raw = json.loads((theirs / "config.json").read_text())
    raw.pop("rope_scaling", None)
    raw["rope_parameters"] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.5}
    (theirs / "config.json").write_text(json.dumps(raw))
    # transformers' dynamic scaling is that of the text's length: here that of what is served.
    ids = random_ids(150, seed=3)
    config = scale_rope(read_config(path), (kind, 2.5))
    assert model_facts(config).max_position_embeddings == 160
    model = load_model(config, torch.float32, torch.device("cpu"), max_positions=len(ids))
    run = PagedRun(model, torch.float32, "torch")
    got = torch.cat([run.step({"a": piece})["a"] for piece in (ids[:40], ids[40:149], ids[149:])])
    wanted = expected(theirs, ids)
    assert (got - wanted).abs().max().item() < 1e-4
    assert (got - expected(path, ids)).abs().max().item() > 1e-3, "the scaling makes a difference"


def test_dynamic_scaling_within_the_context_is_none(tmp_path: Path) -> None:
    path = make_llama(tmp_path, max_position_embeddings=CONTEXT)
    config = scale_rope(read_config(path), ("dynamic", 4.0))
    model = load_model(config, torch.float32, torch.device("cpu"), max_positions=CONTEXT)
    ids = random_ids(CONTEXT, seed=4)
    got = PagedRun(model, torch.float32, "torch").step({"a": ids})["a"]
    assert (got - expected(path, ids)).abs().max().item() < 1e-4


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({}, None),
        ({"rope_factor": 2.0}, ("linear", 2.0)),
        ({"rope_scaling": "dynamic"}, ("dynamic", 1.0)),
        ({"rope_scaling": "dynamic", "rope_factor": 3.0}, ("dynamic", 3.0)),
    ],
)
def test_either_rope_flag_is_enough(said: dict[str, Any], wanted: tuple[str, float] | None) -> None:
    assert ServeConfig(model_id="m", **said).rope == wanted


def test_scalings_of_each_kind_of_layer_are_replaced(tmp_path: Path) -> None:
    nested = {
        "full_attention": LLAMA3 | {"rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    raw = {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT,
        "sliding_window": 16,
        "rope_parameters": nested,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    spec = decoder_spec(scale_rope(read_config(tmp_path), ("linear", 2.0)))
    found = {rope.parameters["rope_theta"]: rope.parameters.get("rope_type") for rope in spec.ropes}
    assert found == {5e5: "linear", 1e4: None}


@pytest.mark.parametrize(
    "raw",
    [
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_positions": 64},
        {"architectures": ["OPTForCausalLM"], "model_type": "opt"},
    ],
)
def test_unscalable_positions_are_refused(raw: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"vocab_size": 256, "n_embd": 64, "n_layer": 1, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw | sizes))
    with pytest.raises(ConfigError, match=f"--rope-scaling is not for {raw['architectures'][0]}"):
        scale_rope(read_config(tmp_path), ("linear", 2.0))


def test_a_family_that_knows_one_scaling_refuses_others(tmp_path: Path) -> None:
    raw = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError, match="'linear' is not supported"):
        scale_rope(read_config(tmp_path), ("linear", 2.0))
