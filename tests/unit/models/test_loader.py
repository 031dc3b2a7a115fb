from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.tools.checkpoints import make_llama, save_weights
from tests.tools.thread_shards import on_shards
from tgi_cli.device.distributed import Shard
from tgi_cli.errors import CheckpointError
from tgi_cli.kernels import cpp_library, without_cpp_kernels
from tgi_cli.models import CausalLM, load_model, read_config
from tgi_cli.quantization import unquantized

CPU = torch.device("cpu")


def load(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(read_config(path), dtype, CPU)


def weights(path: Path) -> dict[str, Tensor]:
    return load_file(path / "model.safetensors")


def test_shards_are_adjacent_in_merged_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unquantized, "ONEDNN_DTYPES", frozenset())
    make_llama(tmp_path, attention_bias=True, tie_word_embeddings=False)
    given = weights(tmp_path)
    model = load(tmp_path)
    loaded = dict(model.named_parameters())
    layer = "model.layers.1"
    qkv = [f"{layer}.self_attn.{name}_proj" for name in "qkv"]
    gate_up = [f"{layer}.mlp.{name}_proj" for name in ("gate", "up")]
    for name, parts in {
        f"{layer}.self_attn.qkv_proj.weight": [f"{part}.weight" for part in qkv],
        f"{layer}.self_attn.qkv_proj.bias": [f"{part}.bias" for part in qkv],
        f"{layer}.mlp.gate_up_proj.weight": [f"{part}.weight" for part in gate_up],
        "lm_head.weight": ["lm_head.weight"],
        "model.norm.weight": ["model.norm.weight"],
    }.items():
        assert torch.equal(loaded[name], torch.cat([given[part] for part in parts]))
    assert model.weight_bytes == sum(4 * tensor.numel() for tensor in given.values())


def test_weights_are_cast_on_the_way(tmp_path: Path) -> None:
    make_llama(tmp_path, dtype=torch.bfloat16)
    given = weights(tmp_path)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model = load(tmp_path, dtype)
        norm = model.get_parameter("model.norm.weight")
        assert norm.dtype == dtype
        assert torch.equal(norm, given["model.norm.weight"].to(dtype))
        assert not norm.requires_grad
        vectors = model.get_submodule("model.embed_tokens")(torch.arange(256))
        assert vectors.dtype == dtype
        assert torch.equal(vectors, given["model.embed_tokens.weight"].to(dtype))


def test_a_table_that_a_head_has_packed_stays_in_its_file(tmp_path: Path) -> None:
    make_llama(tmp_path, tie_word_embeddings=True)
    given = weights(tmp_path)["model.embed_tokens.weight"]
    model = load(tmp_path)
    table = model.get_submodule("model.embed_tokens")
    head = model.get_submodule("lm_head")
    assert table.weight is None
    assert head.weight is None
    assert model.weight_bytes == sum(4 * t.numel() for t in weights(tmp_path).values())
    (tmp_path / "model.safetensors").unlink()  # what is mapped outlives its name
    assert torch.equal(table(torch.tensor([3, 200])), given[[3, 200]])
    torch.testing.assert_close(head(given[:2]), given[:2] @ given.T)


@pytest.mark.skipif(cpp_library() is None, reason="the kernels are not compiled here")
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_vectors_are_the_rows_of_a_head_that_the_kernels_packed(
    load_format: str, tmp_path: Path
) -> None:
    make_llama(tmp_path, tie_word_embeddings=True, vocab_size=250, dtype=torch.bfloat16)
    config = read_config(tmp_path)
    model = load_model(config, torch.bfloat16, CPU, load_format=load_format)
    table = model.get_submodule("model.embed_tokens")
    assert table.weight is None
    assert table.mapped is None  # neither of the two holds memory
    assert table.head is model.get_submodule("lm_head").packed
    with without_cpp_kernels():
        plain = load_model(config, torch.bfloat16, CPU, load_format=load_format)
    ids = torch.tensor([3, 0, 249, 32, 3])
    wanted = plain.get_submodule("model.embed_tokens")(ids)
    assert torch.equal(table(ids), wanted)
    if load_format == "auto":
        assert torch.equal(wanted, weights(tmp_path)["model.embed_tokens.weight"][ids])
    with pytest.raises(IndexError):
        table(torch.tensor([3, 250]))


@pytest.mark.skipif(cpp_library() is None, reason="the kernels are not compiled here")
def test_shards_add_up_the_vectors_of_their_rows(tmp_path: Path) -> None:
    make_llama(tmp_path, tie_word_embeddings=True, vocab_size=251, dtype=torch.bfloat16)
    ids = torch.tensor([3, 125, 126, 250, 0])

    def vectors(shard: Shard) -> tuple[Tensor, bool]:
        model = load_model(read_config(tmp_path), torch.bfloat16, CPU, shard=shard)
        table = model.get_submodule("model.embed_tokens")
        return table(ids), table.head is not None

    wanted = weights(tmp_path)["model.embed_tokens.weight"][ids]
    for got, packed in on_shards(2, vectors):
        assert packed
        assert torch.equal(got, wanted)


def test_a_tied_head_that_is_not_packed_shares_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unquantized, "ONEDNN_DTYPES", frozenset())
    make_llama(tmp_path, tie_word_embeddings=True, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        with without_cpp_kernels():
            model = load(tmp_path, dtype)
        table = model.get_parameter("model.embed_tokens.weight")
        assert table is model.get_submodule("lm_head").weight
        assert table.dtype == dtype


def test_progress_ends_with_all_bytes(tmp_path: Path) -> None:
    make_llama(tmp_path)
    calls: list[tuple[int, int]] = []
    load_model(
        read_config(tmp_path), torch.float32, CPU, lambda done, total: calls.append((done, total))
    )
    total = sum(4 * tensor.numel() for tensor in weights(tmp_path).values())
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)
    assert len(calls) > 10


def test_known_unneeded_tensors_are_ignored(tmp_path: Path) -> None:
    make_llama(tmp_path, tie_word_embeddings=True)
    given = weights(tmp_path)
    given["lm_head.weight"] = given["model.embed_tokens.weight"].clone()
    given["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_weights(tmp_path, given)
    load(tmp_path)


def test_all_wrong_tensors_are_named_in_one_error(tmp_path: Path) -> None:
    make_llama(tmp_path)
    given = weights(tmp_path)
    for layer in range(3):
        for name in ("q", "k"):
            del given[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
    given["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    given["model.norm.weight"] = torch.ones(32)
    given["model.layers.2.mlp.up_proj.weight"] = torch.ones(160, 64, dtype=torch.int8)
    save_weights(tmp_path, given)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    cause = caught.value.cause
    assert "6 missing: model.layers.0.self_attn.q_proj.weight, " in cause
    assert " and 1 more; " in cause
    assert "1 unexpected: model.layers.0.self_attn.q_norm.weight; " in cause
    assert "1 of another shape: model.norm.weight [32] instead of [64]; " in cause
    assert "1 of another type: model.layers.2.mlp.up_proj.weight (I8)" in cause
    assert "\n" not in cause


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    make_llama(tmp_path, tie_word_embeddings=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, 20_000])
def test_a_truncated_file_is_named(keep: int, tmp_path: Path) -> None:
    make_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read") as caught:
        load(tmp_path)
    assert "download it again" in caught.value.remedy


def test_a_folder_without_weights(tmp_path: Path) -> None:
    make_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors and no"):
        load(tmp_path)


def test_an_index_that_names_an_absent_file(tmp_path: Path) -> None:
    make_llama(tmp_path, files=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"not in .*: model-00002-of-00003\.safetensors"):
        load(tmp_path)


def test_an_index_that_names_an_absent_tensor(tmp_path: Path) -> None:
    make_llama(tmp_path, files=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    content["weight_map"]["model.extra"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index(content: str, tmp_path: Path) -> None:
    make_llama(tmp_path, files=2)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        load(tmp_path)


_MEASURE = """
import sys
from pathlib import Path

import torch

from tgi_cli.device import peak_memory
from tgi_cli.models import load_model, read_config

torch.set_num_threads(1)
before = peak_memory(torch.device("cpu"))
model = load_model(read_config(Path(sys.argv[1])), torch.bfloat16, torch.device("cpu"))
print(model.weight_bytes, peak_memory(torch.device("cpu")) - before)
"""


def test_loading_holds_no_second_copy(tmp_path: Path) -> None:
    """In a process of its own, since memory that was freed before would hide the peak."""
    make_llama(tmp_path, shape="60m", dtype=torch.bfloat16)
    on_disk = (tmp_path / "model.safetensors").stat().st_size
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    kept, peak = map(int, done.stdout.split())
    assert on_disk > 100e6
    table = 2 * 16384 * 576
    assert on_disk * 0.99 < kept < (on_disk + table) * 1.01  # a tied head may be kept twice
    # Beside what is kept: huge pages that are begun, pages of the mapped file, one layer.
    assert peak < kept + 80e6
