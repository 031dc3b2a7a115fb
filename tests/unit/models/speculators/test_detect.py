from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.tools.checkpoints import make_llama
from tests.tools.draft_heads import edit, make_eagle3, make_medusa, make_mlp_speculator, save
from tgi_cli.errors import CheckpointError, ModelError, UnsupportedModelError
from tgi_cli.models.speculators.detect import base_model, detect


def test_kinds_are_told_apart(tmp_path: Path) -> None:
    made = {
        make_eagle3(tmp_path / "sglang", "sglang"): ("eagle3", 3, 16),
        make_eagle3(tmp_path / "vllm", "vllm"): ("eagle3", 3, 16),
        make_eagle3(tmp_path / "speculators", "speculators"): ("eagle3", 5, 16),
        make_medusa(tmp_path / "tgi", "tgi"): ("medusa", 3, 3),
        make_medusa(tmp_path / "tgi2", "tgi2", heads=4): ("medusa", 4, 4),
        make_medusa(tmp_path / "medusa", "vllm"): ("medusa", 3, 3),
        make_mlp_speculator(tmp_path / "mlp"): ("mlp_speculator", 3, 3),
        make_llama(tmp_path / "llama"): ("draft_model", 3, 16),
    }
    for path, expected in made.items():
        found = detect(path)
        assert (found.method, found.num_drafts, found.most_drafts) == expected, path.name


def test_an_architecture_of_llama_does_not_hide_a_head(tmp_path: Path) -> None:
    """SafeAILab's own files name LlamaForCausalLM."""
    make_eagle3(tmp_path, "vllm")
    edit(tmp_path, lambda config, _: config.update(architectures=["LlamaForCausalLM"]))
    assert detect(tmp_path).method == "eagle3"


def test_the_first_versions_of_eagle_are_refused(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del tensors["midlayer.hidden_norm.weight"]

    make_eagle3(tmp_path, "vllm")
    with pytest.raises(UnsupportedModelError, match="EAGLE's first two versions"):
        detect(edit(tmp_path, change))


def test_other_speculators_are_refused(tmp_path: Path) -> None:
    make_eagle3(tmp_path, "speculators")
    edit(tmp_path, lambda config, _: config.update(speculators_model_type="dflash"))
    with pytest.raises(UnsupportedModelError, match="type 'dflash' are not supported"):
        detect(tmp_path)


def test_folders_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        detect(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="is not a JSON object"):
        detect(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        detect(tmp_path)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"medusa_num_heads": "3"}, ModelError, "'medusa_num_heads' is '3', not int"),
        ({"medusa_num_heads": 0}, ModelError, "must be positive"),
        ({"medusa_num_heads": 17}, UnsupportedModelError, "17 heads, at most 16 are used"),
        ({"hidden_size": 1 << 40}, ModelError, "states 'hidden_size'"),
    ],
)
def test_values_that_cannot_be(
    tmp_path: Path, values: dict[str, Any], error: type[Exception], message: str
) -> None:
    make_medusa(tmp_path, "tgi")
    with pytest.raises(error, match=message):
        detect(edit(tmp_path, lambda config, _: config.update(values)))


def test_broken_files(tmp_path: Path) -> None:
    make_medusa(tmp_path, "tgi")
    (tmp_path / "medusa_lm_head.safetensors").write_bytes(b"\x08" * 40)
    with pytest.raises(CheckpointError, match="medusa_lm_head"):
        detect(tmp_path)


def test_the_model_that_heads_are_for(tmp_path: Path) -> None:
    assert base_model(make_medusa(tmp_path / "medusa", "tgi")) == "org/base"
    assert base_model(make_mlp_speculator(tmp_path / "mlp")) == "org/base"
    assert base_model(make_eagle3(tmp_path / "eagle3", "vllm")) is None
    assert base_model(make_llama(tmp_path / "llama")) is None
    assert base_model(tmp_path / "nowhere") is None
    nameless = save(tmp_path / "nameless", {"medusa_num_heads": 1}, {}, "model.safetensors")
    assert base_model(nameless) is None
