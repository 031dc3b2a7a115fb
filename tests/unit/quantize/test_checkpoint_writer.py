"""What is written and read besides tensors of a model: shards, hidden states, state, model card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tgi_cli.errors import ConfigError
from tgi_cli.quantize.block_runner import ActivationFile
from tgi_cli.quantize.checkpoint_writer import tensors_in, write_shards
from tgi_cli.quantize.gptq import LayerReport
from tgi_cli.quantize.model_card import model_card
from tgi_cli.quantize.unfinished_run import UnfinishedRun


def _tensors() -> dict[str, torch.Tensor]:
    return {
        "a": torch.randn(3, 5).bfloat16(),  # of odd sizes: nothing behind it would be aligned
        "b": torch.arange(7, dtype=torch.int8),
        "c": torch.randn(4, 4),
        "d": torch.arange(6).view(2, 3),
        "e": torch.randn(8).to(torch.float8_e4m3fn),
        "f": torch.randn(()),
        "g": torch.empty(0, 4),
    }


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


@pytest.mark.parametrize("max_bytes", [1 << 20, 64, 1])
def test_shards_hold_every_tensor_bit_by_bit(max_bytes: int, tmp_path: Path) -> None:
    tensors = _tensors()
    save_file(tensors, tmp_path / "source.safetensors")
    out = tmp_path / "out"
    out.mkdir()
    found = {each.name: each for each in tensors_in(tmp_path / "source.safetensors")}
    total = write_shards(out, {name: found[name] for name in tensors}, max_bytes)
    assert total == sum(each.numel() * each.dtype.itemsize for each in tensors.values())
    files = sorted(out.glob("*.safetensors"))
    assert (len(files) > 1) == (max_bytes < total)
    read = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert read.keys() == tensors.keys()
    assert all(_alike(read[name], tensors[name]) for name in tensors)
    if len(files) > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == total
        for file in files:
            assert {n for n, f in index["weight_map"].items() if f == file.name} == set(
                load_file(file)
            )
        for file in files:
            sizes = [each.numel() * each.dtype.itemsize for each in load_file(file).values()]
            assert sum(sizes) <= max_bytes or len(sizes) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activation_files_return_what_was_written(dtype: torch.dtype, tmp_path: Path) -> None:
    rows = torch.randn(5, 3, 4).to(dtype)
    kept = ActivationFile(tmp_path / "x.bin", 5, 3, 4, dtype)
    kept.write(2, rows[2:])
    kept.write(0, rows[:2])
    assert torch.equal(kept.read(1, 4), rows[1:4])
    kept.flush()
    again = ActivationFile(tmp_path / "x.bin", 5, 3, 4, dtype)
    assert torch.equal(again.read(0, 5), rows)
    with pytest.raises(OSError, match="shorter than it was written"):
        ActivationFile(tmp_path / "x.bin", 9, 3, 4, dtype).read(4, 9)
    again.remove()
    assert not (tmp_path / "x.bin").exists()


def test_a_run_is_taken_up_where_it_was_left(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = UnfinishedRun(out, {"bits": 4}, resume=False)
    first.commit(
        {"x": torch.ones(2)}, [LayerReport("a", 0.5), LayerReport("b", float("nan"), "why")]
    )
    second = UnfinishedRun(out, {"bits": 4}, resume=True)
    assert second.done == 1
    assert [layer.name for layer in second.layers] == ["a", "b"]
    assert second.layers[1].note == "why"
    assert load_file(second.block(0))["x"].tolist() == [1, 1]
    whole = second.folder / "checkpoint"
    whole.mkdir()
    (whole / "file").write_text("x")
    second.finish(whole)
    assert (out / "file").read_text() == "x"
    assert not second.folder.exists()


def test_only_the_same_run_can_be_resumed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="no unfinished run"):
        UnfinishedRun(out, {"bits": 4}, resume=True)
    UnfinishedRun(out, {"bits": 4, "seed": 0}, resume=False)
    with pytest.raises(ConfigError, match="belongs to an unfinished run"):
        UnfinishedRun(out, {"bits": 4, "seed": 0}, resume=False)
    with pytest.raises(ConfigError, match=r"had other bits$"):
        UnfinishedRun(out, {"bits": 3, "seed": 0}, resume=True)
    out.mkdir()
    (out / "x").touch()
    with pytest.raises(ConfigError, match="not an empty folder"):
        UnfinishedRun(out, {"bits": 4, "seed": 0}, resume=True)


def test_a_model_card_inherits_only_applicable_metadata(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "---\nlicense: other\nlicense_name: x\nlanguage:\n- en\n- de\nwidget:\n- text: no\n---\n"
    )
    card = model_card(
        name="small",
        original="someone/large",
        folder=tmp_path,
        description="gptq, 4 bits",
        command="tgi quantize someone/large small",
        calibration="3 samples",
        layers=[LayerReport(f"layer {i}", 0.001 * i, "odd" * (i == 2)) for i in range(9)],
        ignored=1,
        evaluation=None,
    )
    head, _, body = card.removeprefix("---\n").partition("---\n")
    assert "base_model: someone/large" in head
    assert "license_name: x\nlanguage:\n- en\n- de" in head
    assert "widget" not in head
    assert "text: no" not in head
    assert "tgi quantize someone/large small" in body
    assert "| layer 8 | 8.0e-03 |" in body
    assert "layer 3 |" not in body, "the worst are enough"
    assert "- layer 2: odd" in body
