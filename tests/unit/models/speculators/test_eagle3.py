from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.tools.draft_heads import LAYER, edit, make_eagle3
from tests.tools.paged_run import CPU, random_ids
from tests.unit.models.speculators.plain import PlainEagle3
from tests.unit.models.speculators.steps import Entry, Steps, Target, states_of
from tgi_cli.errors import CheckpointError, ModelError, UnsupportedModelError
from tgi_cli.models.speculators.base import Proposer
from tgi_cli.models.speculators.detect import detect
from tgi_cli.models.speculators.load import ProposerOptions, load_proposer


def load(path: Path, target: Target | None = None, **changes: Any) -> Proposer:
    sizes = {"num_layers": 12, "hidden_size": 64, "vocab_size": 256} | changes
    options = ProposerOptions(torch.float32, CPU, 4, 128, 16, **sizes)
    return load_proposer(detect(path), target or Target(64), options)


def check(path: Path, *flags: str, size: int = 64, count: int = 3) -> None:
    """The head's drafts are those of the plain one with these flags."""
    target, tokens = Target(size), random_ids(30, 1)
    proposer = load(path, target, hidden_size=size)
    steps = Steps(proposer, count * size, 16)
    steps.add(0, tokens)
    found = steps.step(Entry(0, 20))[0]
    plain = PlainEagle3(load_file(path / "model.safetensors"), LAYER, target.table, *flags)
    expected = plain.drafts(states_of(tokens[:20], count * size), tokens[:21], 4)
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], rel=1e-3)


@pytest.mark.parametrize("layout", ["sglang", "vllm", "speculators"])
def test_layouts(tmp_path: Path, layout: str) -> None:
    make_eagle3(tmp_path, layout, norm_before_residual=False)
    check(tmp_path)


@pytest.mark.parametrize(
    "flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]
)
@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_norms(tmp_path: Path, layout: str, flag: str) -> None:
    flags: dict[str, Any] = {"norm_before_residual": False, flag: True}
    make_eagle3(tmp_path, layout, **flags)
    check(tmp_path, flag)


def test_heads_of_speculators_norm_before_the_residual_by_default(tmp_path: Path) -> None:
    make_eagle3(tmp_path, "speculators")
    check(tmp_path, "norm_before_residual")


def test_flags_within_eagle_config(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["eagle_config"]["norm_before_fc"] = config.pop("norm_before_fc")

    make_eagle3(tmp_path, "sglang", layer_ids=[0, 1, 2], norm_before_fc=True)
    check(edit(tmp_path, change), "norm_before_fc")


def test_a_table_a_vocabulary_and_norms_of_its_own(tmp_path: Path) -> None:
    make_eagle3(tmp_path / "table", "vllm", own_embedding=True)
    check(tmp_path / "table")
    make_eagle3(tmp_path / "whole", "vllm", draft_vocab=False)
    check(tmp_path / "whole")
    make_eagle3(tmp_path / "qwen", "speculators", qk_norm=True, norm_before_residual=False)
    check(tmp_path / "qwen")


def test_another_number_of_layers_and_another_width(tmp_path: Path) -> None:
    make_eagle3(tmp_path / "two", "vllm", layer_ids=[1, 5])
    check(tmp_path / "two", count=2)
    make_eagle3(tmp_path / "wide", "vllm", target_size=32, own_embedding=True)
    check(tmp_path / "wide", size=32)


def test_names_with_a_prefix(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    make_eagle3(tmp_path / "plain", "vllm")
    plain = Steps(load(tmp_path / "plain"), 192, 16)
    prefixed = Steps(load(edit(make_eagle3(tmp_path / "model", "vllm"), change)), 192, 16)
    for steps in (plain, prefixed):
        steps.add(0, random_ids(30, 1))
    assert plain.step(Entry(0, 20)) == prefixed.step(Entry(0, 20))


@pytest.mark.parametrize(
    ("layout", "stated", "read"),
    [
        ("vllm", [2, 6, 9], (2, 6, 9)),
        ("speculators", [2, 6, 9], (2, 6, 9)),
        ("sglang", [1, 5, 8], (2, 6, 9)),
        ("vllm", None, (2, 6, 9)),
        ("sglang", None, (2, 6, 9)),
        ("speculators", [2, 12], (2, 12)),
    ],
)
def test_which_layers_are_read(
    tmp_path: Path, layout: str, stated: list[int] | None, read: tuple[int, ...]
) -> None:
    """SGLang's ids are of outputs, the others' of inputs."""
    make_eagle3(tmp_path, layout, layer_ids=stated)
    assert load(tmp_path).needs == read


def test_tokens_outside_of_the_vocabulary(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["d2t"][7] = 249

    make_eagle3(tmp_path, "vllm")
    with pytest.raises(CheckpointError, match="'d2t' names token 256 of a vocabulary of 256"):
        load(edit(tmp_path, change))


def _pop(*names: str) -> Any:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in names:
            del tensors[name]

    return change


def _set(**values: Any) -> Any:
    return lambda config, tensors: config.update(values)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_set(num_hidden_layers=2), UnsupportedModelError, "a head of 2 layers"),
        (_set(vocab_size=300), ModelError, "is for 300 tokens, and the model has 256"),
        (_set(eagle_config={"use_aux_hidden_state": False}), UnsupportedModelError, "alone"),
        (_set(eagle_aux_hidden_state_layer_ids=[1, 2, 99]), ModelError, "with 12 layers"),
        (_set(eagle_aux_hidden_state_layer_ids=["2"]), ModelError, "no list of layers"),
        (_set(eagle_aux_hidden_state_layer_ids=[1, 2]), CheckpointError, "fc.weight"),
        (_set(norm_output="yes"), ModelError, "'norm_output' is 'yes', not bool"),
        (_set(sliding_window=64, use_sliding_window=True), UnsupportedModelError, "window of 64"),
        (_pop("d2t"), ModelError, "no tensor 'd2t'"),
        (_pop("lm_head.weight"), ModelError, "no tensor 'lm_head.weight'"),
        (_pop("midlayer.mlp.up_proj.weight"), CheckpointError, "1 missing"),
    ],
)
def test_refusals(tmp_path: Path, change: Any, error: type[Exception], message: str) -> None:
    make_eagle3(tmp_path, "vllm")
    with pytest.raises(error, match=message):
        load(edit(tmp_path, change))


def test_a_window_that_is_not_reached_is_none(tmp_path: Path) -> None:
    make_eagle3(tmp_path, "vllm")
    edit(tmp_path, _set(sliding_window=128, use_sliding_window=True))
    check(tmp_path)


def test_a_target_that_does_not_give_its_states(tmp_path: Path) -> None:
    make_eagle3(tmp_path, "vllm")
    silent = Target(64)
    silent.captures_states = False
    with pytest.raises(UnsupportedModelError, match="hidden states that this model does not give"):
        load(tmp_path, silent)


def test_a_copy_of_the_target_s_table_is_not_kept(tmp_path: Path) -> None:
    target = Target(64)

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["embed_tokens.weight"] = target.table

    make_eagle3(tmp_path, "vllm", own_embedding=True)
    own = load(tmp_path, target).weight_bytes
    assert load(edit(tmp_path, change), target).weight_bytes == own - 256 * 64 * 4
    check(tmp_path)


def test_an_output_head_that_is_tied_to_its_own_table(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["tie_word_embeddings"] = True
        del tensors["lm_head.weight"]

    make_eagle3(tmp_path, "vllm", own_embedding=True, draft_vocab=False)
    with pytest.raises(UnsupportedModelError, match="tied to the head's token table"):
        load(edit(tmp_path, change))


def test_the_target_s_output_head(tmp_path: Path) -> None:
    """Where the head has neither one nor a vocabulary of its own."""

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = target.head

    target, tokens, found = Target(64), random_ids(30, 1), []
    make_eagle3(tmp_path / "whole", "vllm", draft_vocab=False)
    edit(tmp_path / "whole", change)
    make_eagle3(tmp_path / "part", "vllm", draft_vocab=False)
    edit(tmp_path / "part", _pop("lm_head.weight"))
    for name in ("whole", "part"):
        steps = Steps(load(tmp_path / name, target), 192, 16)
        steps.add(0, tokens)
        found.append(steps.step(Entry(0, 20))[0])
    assert found[0][0] == found[1][0]
