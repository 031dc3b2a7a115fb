"""Names and parts of tensors, where the parity tests' files have no example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.gguf.test_model_config import LLAMA, make
from tgi_cli.errors import ModelError
from tgi_cli.gguf import weight_names
from tgi_cli.gguf.weight_names import WeightView, weight_views

MIXTURE: dict[str, Any] = LLAMA | {"expert_count": 2, "expert_used_count": 1}


def views(
    folder: Path, architecture: str, keys: dict[str, Any], *tensors: tuple[str, tuple[int, ...]]
) -> dict[str, WeightView]:
    return {view.name: view for view in weight_views(make(folder, architecture, keys, tensors))}


def test_queries_keys_and_values_in_one_tensor(tmp_path: Path) -> None:
    fused = [("blk.0.attn_qkv.weight", (64, 128)), ("blk.0.attn_qkv.bias", (128,))]
    found = views(tmp_path, "llama", LLAMA, *fused)
    start = found["model.layers.0.self_attn.q_proj.weight"].start
    for part, first, outputs in (("q", 0, 64), ("k", 64, 32), ("v", 96, 32)):
        view = found[f"model.layers.0.self_attn.{part}_proj.weight"]
        assert view.shape == (outputs, 64)
        assert (view.start - start, view.size) == (first * 64 * 4, outputs * 64 * 4)
        assert (view.rows is not None) == (part in "qk")
        bias = found[f"model.layers.0.self_attn.{part}_proj.bias"]
        assert (bias.shape, bias.size) == ((outputs,), outputs * 4)


def test_gates_and_ups_of_experts_in_one_tensor(tmp_path: Path) -> None:
    found = views(tmp_path, "qwen3moe", MIXTURE, ("blk.0.ffn_gate_up_exps.weight", (64, 48, 2)))
    first = found["model.layers.0.mlp.experts.0.gate_proj.weight"].start
    names = [f"experts.{e}.{part}_proj" for e in range(2) for part in ("gate", "up")]
    for index, name in enumerate(names):
        view = found[f"model.layers.0.mlp.{name}.weight"]
        assert view.shape == (24, 64)
        assert view.start == first + index * 24 * 64 * 4


def test_experts_of_older_files(tmp_path: Path) -> None:
    tensors = [(f"blk.1.ffn_{part}.1.weight", (64, 96)) for part in ("gate", "down", "up")]
    found = views(tmp_path, "llama", MIXTURE, *tensors)
    prefix = "model.layers.1.block_sparse_moe.experts.1"
    assert {f"{prefix}.{name}.weight" for name in ("w1", "w2", "w3")} <= found.keys()


def test_a_shared_expert_is_gated_by_a_row(tmp_path: Path) -> None:
    found = views(tmp_path, "qwen2moe", MIXTURE, ("blk.0.ffn_gate_inp_shexp.weight", (64,)))
    assert found["model.layers.0.mlp.shared_expert_gate.weight"].final_shape == (1, 64)


def test_what_is_not_needed_and_what_is_not_known(tmp_path: Path) -> None:
    keys = LLAMA | {"nextn_predict_layers": 1}
    names = ("rope_freqs.weight", "blk.0.attn_rot_embd", "blk.1.attn_q.weight", "blk.0.new.weight")
    found = views(tmp_path, "llama", keys, *((name, (64, 64)) for name in names))
    assert found.keys() == {"model.embed_tokens.weight", "blk.0.new.weight"}


def test_layers_beyond_the_stated_number_keep_their_names(tmp_path: Path) -> None:
    """So that they are unexpected: a number that is too small would make another model."""
    keys = LLAMA | {"nextn_predict_layers": 1}
    names = ("blk.0.ffn_up.weight", "blk.1.ffn_up.weight", "blk.2.ffn_up.weight")
    found = views(tmp_path, "llama", keys, *((name, (64, 96)) for name in names))
    expected = {"model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"}
    assert found.keys() == expected | {"blk.2.ffn_up.weight"}


def test_a_norm_that_is_stored_as_one_more_has_its_own_bias(tmp_path: Path) -> None:
    names = ("blk.0.attn_norm.weight", "blk.0.attn_norm.bias", "output_norm.weight")
    found = views(tmp_path, "nemotron", LLAMA, *((name, (64,)) for name in names))
    assert found["model.layers.0.input_layernorm.weight"].numbers is not None
    assert found["model.norm.weight"].numbers is not None
    assert found["model.layers.0.input_layernorm.bias"].numbers is None


def test_convolutions_and_decays_with_dimensions_of_1(tmp_path: Path) -> None:
    tensors = [("blk.0.ssm_conv1d_q.weight", (4, 1, 64, 1)), ("blk.0.ssm_a", (1, 4, 1, 1))]
    found = views(tmp_path, "kimi-linear", LLAMA, *tensors)
    assert found["model.layers.0.self_attn.q_conv1d.weight"].final_shape == (64, 1, 4)
    assert found["model.layers.0.self_attn.A_log"].final_shape == (4,)


def test_numbers_of_layers_that_are_not_written_as_numbers_are(tmp_path: Path) -> None:
    names = ("blk.00.attn_q.weight", f"blk.{'9' * 100}.attn_q.weight", "blk.\u0661.attn_q.weight")
    found = views(tmp_path, "llama", LLAMA, *((name, (64, 64)) for name in names))
    assert found.keys() == {"model.embed_tokens.weight", *names}


@pytest.mark.parametrize("dims", [(), (64,)])
def test_experts_without_dimensions(dims: tuple[int, ...], tmp_path: Path) -> None:
    for name in ("ffn_up_exps", "ffn_gate_up_exps"):
        with pytest.raises(ModelError, match=name):
            views(tmp_path, "qwen3moe", MIXTURE, (f"blk.0.{name}.weight", dims))


def test_experts_without_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_names, "_MOST_VIEWS", 100)
    with pytest.raises(ModelError, match="have more than 100 parts"):
        views(tmp_path, "qwen3moe", MIXTURE, ("blk.0.ffn_up_exps.weight", (1, 1, 100)))
    monkeypatch.undo()
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up_exps\.weight has 1025 experts"):
        views(tmp_path, "qwen3moe", MIXTURE, ("blk.0.ffn_up_exps.weight", (1, 1, 1025)))


def test_value_heads_without_number(tmp_path: Path) -> None:
    sizes = {"ssm.state_size": 1 << 30, "ssm.group_count": 1 << 20}
    sizes |= {"ssm.time_step_rank": 1 << 20, "ssm.inner_size": 1 << 20}
    with pytest.raises(ModelError, match="1048576 key heads have 1073741824 numbers"):
        views(tmp_path, "qwen35", LLAMA | sizes)


def test_parts_of_another_size(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="100 instead of 128 outputs"):
        views(tmp_path, "llama", LLAMA, ("blk.0.attn_qkv.weight", (64, 100)))
