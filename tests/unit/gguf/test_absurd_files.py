"""Files whose keys and names state more than they have cost no more than what they have."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools.gguf_models import NORMAL, SPM_TOKENS, demo_metadata, metadata_file, spm_metadata
from tests.unit.gguf.test_model_config import LLAMA, encoded, make
from tests.unit.gguf.test_reader import header, read
from tgi_cli import demo
from tgi_cli.errors import CheckpointError, CorruptFileError, ModelError, UnsupportedModelError
from tgi_cli.gguf.model_config import model_config
from tgi_cli.gguf.reader import GGUFFile
from tgi_cli.gguf.tokenizer import read_tokenizer
from tgi_cli.gguf.weight_names import weight_views
from tgi_cli.models.gguf_weights import gguf_tensors

HUGE = (1 << 31) - 1
MEGABYTES = 64
STATES: dict[str, Any] = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
}


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MEGABYTES << 20
    finally:
        tracemalloc.stop()


HEADS = {
    "attention.head_count": HUGE,
    "attention.head_count_kv": HUGE,
    "attention.layer_norm_epsilon": 1e-5,
}


def read_all(file: GGUFFile) -> None:
    model_config(file)
    assert list(weight_views(file))


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("llama", {"block_count": HUGE}),
        ("llama4", {"block_count": HUGE, "expert_count": 2, "expert_used_count": 1}),
        ("gemma4", {"block_count": HUGE, "attention.sliding_window": 8}),
        ("qwen35", STATES | {"block_count": HUGE}),
        ("llama", HEADS),
        ("gptneox", HEADS),
        ("falcon", HEADS),
        ("qwen35", STATES | {"ssm.state_size": HUGE}),
        ("qwen35", STATES | {"ssm.inner_size": HUGE - 3}),
    ],
)
def test_sizes_that_no_tensor_has(architecture: str, keys: dict[str, Any], tmp_path: Path) -> None:
    file = make(tmp_path, architecture, LLAMA | keys)
    with pytest.raises(ModelError, match="it states "):
        read_all(file)


@pytest.mark.parametrize("dims", [(), (64,)])
def test_a_vector_in_a_matrix_s_place(dims: tuple[int, ...], tmp_path: Path) -> None:
    keys = [encoded("general.architecture", "llama")]
    keys += [encoded(f"llama.{name}", value) for name, value in LLAMA.items()]
    content = header(keys, [("token_embd.weight", dims, 0, 0)], data=256)
    with pytest.raises(ModelError, match=r"token_embd.weight has the shape"):
        model_config(read(tmp_path / "model.gguf", content))


def test_a_tensor_without_dimensions(tmp_path: Path) -> None:
    file = make(tmp_path, "llama", LLAMA, [("blk.0.ffn_down_exps.weight", ())])
    with pytest.raises(ModelError, match="no dimensions"):
        list(weight_views(file))


def test_a_layer_s_number_of_thousands_of_digits(tmp_path: Path) -> None:
    name = f"blk.{'1' * 5000}.attn_q.weight"
    found = weight_views(make(tmp_path, "llama", LLAMA, [(name, (64, 64))]))
    assert [view.name for view in found][1:] == [name]


def test_more_experts_than_there_can_be(tmp_path: Path) -> None:
    keys = LLAMA | {"expert_count": 2, "expert_used_count": 1}
    file = make(tmp_path, "qwen3moe", keys, [("blk.0.ffn_up_exps.weight", (1, 1, 300_000))])
    tracemalloc.stop()  # what is traced takes four times as long
    with pytest.raises(CheckpointError, match="more than 262144 weights"):
        gguf_tensors(file)
    tracemalloc.start()


def test_tokens_whose_parts_are_too_many(tmp_path: Path) -> None:
    texts, scores, types = (list(each) for each in zip(*SPM_TOKENS, strict=True))
    metadata = spm_metadata(
        tokens=[*texts, "a" * 20_000], scores=[*scores, -9.0], token_type=[*types, NORMAL]
    )
    with pytest.raises(UnsupportedModelError, match="too long"):
        read_tokenizer(metadata_file(tmp_path / "vocabulary.gguf", metadata))


def test_a_complete_tokenizer_whose_merges_lack_their_prefix(tmp_path: Path) -> None:
    raw = json.loads((demo.model_path() / "tokenizer.json").read_text())
    raw["model"]["continuing_subword_prefix"] = "a" * 1000
    metadata = demo_metadata() | {"tokenizer.huggingface.json": json.dumps(raw)}
    with pytest.raises(CorruptFileError, match="lacks `continuing_subword_prefix`"):
        read_tokenizer(metadata_file(tmp_path / "vocabulary.gguf", metadata))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none(value: float, tmp_path: Path) -> None:
    for name in ("attention.layer_norm_rms_epsilon", "rope.freq_base"):
        with pytest.raises(ModelError, match=name):
            model_config(make(tmp_path, "llama", LLAMA | {name: value}))
