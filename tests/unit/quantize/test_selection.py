"""Which layers are chosen, where tensors stand in parameters, and in which order they come."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.cases import CASES
from tests.parity.families import make_checkpoint
from tests.tools.checkpoints import make_llama
from tests.tools.paged_run import CPU, random_ids
from tgi_cli.errors import ConfigError
from tgi_cli.models.stored_tensor import StoredTensor
from tgi_cli.models.weight_map import Source
from tgi_cli.quantization.algorithms.recipe import Recipe
from tgi_cli.quantize.block_runner import BlockRunner
from tgi_cli.quantize.checkpoint_map import locate_tensors
from tgi_cli.quantize.offloaded_model import OffloadedModel
from tgi_cli.quantize.selection import select_layers
from tgi_cli.quantize.stages import target_modules, trace_block

RECIPE = Recipe(method="gptq", group_size=32)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> OffloadedModel:
    path = make_llama(tmp_path_factory.mktemp("llama"), tie_word_embeddings=False)
    return OffloadedModel(path, CPU)


def _stored(*sizes: tuple[int, int]) -> dict[str, StoredTensor]:
    return {str(i): StoredTensor(str(i), Path(), size, "F32") for i, size in enumerate(sizes)}


def test_stacked_tensors_have_indices() -> None:
    stored = _stored((4, 6), (4, 6), (2, 6), (2, 6))

    def join(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.cat([a, c]), torch.cat([b, d])])

    source = Source(tuple(stored), join=join)
    assert locate_tensors(source, stored, (2, 6, 6)) == [
        ("0", (0, slice(0, 4))),
        ("2", (0, slice(4, 6))),
        ("1", (1, slice(0, 4))),
        ("3", (1, slice(4, 6))),
    ]
    assert locate_tensors(source, stored, (2, 7, 6)) is None, "of another size"


@pytest.mark.parametrize(
    "join",
    [
        lambda a, b: torch.stack([a, b]).transpose(1, 2),
        lambda a, b: torch.cat([a, b], 1),
        lambda a, b: torch.cat([a, b]) * 2,
        lambda a, b: torch.stack([a, b], 1).flatten(0, 1),  # rows in turns
    ],
)
def test_tensors_that_do_not_tile_the_parameter_have_none(join: object) -> None:
    stored = _stored((4, 6), (4, 6))
    assert locate_tensors(Source(("0", "1"), join=join), stored, (8, 6)) is None  # type: ignore[arg-type]


def test_layers_of_blocks_are_selected_but_not_the_head(llama: OffloadedModel) -> None:
    found = select_layers(llama, RECIPE)
    assert [len(block) for block in found.blocks] == [7, 7, 7]
    assert found.ignored == ("lm_head",)
    assert {layer.name for layer in found.blocks[1]} == {
        f"model.layers.1.{name}"
        for name in (
            *(f"self_attn.{each}_proj" for each in "qkvo"),
            *(f"mlp.{each}_proj" for each in ("gate", "up", "down")),
        )
    }
    assert found.blocks[0][0].shape == (128, 64)


def test_patterns_include_and_exclude_layers(llama: OffloadedModel) -> None:
    found = select_layers(llama, RECIPE, ["*.mlp.*", "*.q_proj"], ["*.2.*"])
    names = [layer.name for block in found.blocks for layer in block]
    assert len(names) == 8
    assert all("mlp" in name or "q_proj" in name for name in names)
    assert "model.layers.2.mlp.up_proj" in found.ignored
    with pytest.raises(ConfigError, match="matches no layer"):
        select_layers(llama, RECIPE, ["up_proj"])
    with pytest.raises(ConfigError, match="no layer left"):
        select_layers(llama, RECIPE, ["*.q_proj"], ["*.q_proj"])


def test_layers_that_the_format_cannot_represent_are_ignored(tmp_path: Path) -> None:
    model = OffloadedModel(make_llama(tmp_path, intermediate_size=100), CPU)
    found = select_layers(model, RECIPE)
    names = {layer.name.rpartition(".")[2] for block in found.blocks for layer in block}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert "multiple of 8" in found.unfit["model.layers.0.mlp.down_proj"]
    assert "model.layers.0.mlp.down_proj" in found.ignored


def _stages(path: Path, tmp_path: Path, block: int = 0) -> list[list[set[str]]]:
    with torch.no_grad():
        model = OffloadedModel(path, CPU)
        runner = BlockRunner(model, torch.tensor([random_ids(40, seed=1)]))
        hidden = runner.begin(tmp_path / "inputs")
        assert hidden is not None
        at = model.block_paths[block]
        model.materialize(at)
        targets = target_modules(at, model.blocks[block], model.linear_layers(block))
        trace = trace_block(
            model.blocks[block], targets, lambda: runner.run(block, 0, hidden.read(0, 1))
        )
    assert not trace.uncalled
    return [
        [{target.path.rpartition(".")[2] for target in group} for group in stage.groups]
        for stage in trace.stages
    ]


def test_stages_follow_the_order_of_calls(llama: OffloadedModel, tmp_path: Path) -> None:
    assert _stages(llama.config.path, tmp_path) == [
        [{"q_proj", "k_proj", "v_proj"}],
        [{"o_proj"}],
        [{"gate_proj", "up_proj"}],
        [{"down_proj"}],
    ]


def test_experts_share_a_stage_with_layers_of_the_same_input(tmp_path: Path) -> None:
    path = make_checkpoint(CASES["Qwen 2 MoE"], tmp_path / "model")
    stages = _stages(path, tmp_path)
    assert stages[0] == [{"q_proj", "k_proj", "v_proj"}]
    [together] = [group for stage in stages for group in stage if "experts" in group]
    assert {"experts", "gate_proj", "up_proj"} <= together
    assert [{"down_proj"}] in stages


def test_parallel_blocks_share_one_input(tmp_path: Path) -> None:
    from tests.parity.test_fallback import CASES as FALLBACK

    path = make_checkpoint(FALLBACK["Cohere"], tmp_path / "model")
    assert _stages(path, tmp_path)[0] == [{"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}]
